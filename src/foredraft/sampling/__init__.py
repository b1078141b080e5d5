"""Sampling parameters, distributions, grammars and seeded random numbers."""
