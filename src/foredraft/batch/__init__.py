"""Batch jobs: many requests from a file, answered as a server would answer them."""
