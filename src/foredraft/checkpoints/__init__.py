"""Checkpoints of drafters: readers, checks, writers and exports to other engines."""
