"""Verification rules, and the target probabilities that they read."""
