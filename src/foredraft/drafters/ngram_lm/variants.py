"""Configurations of the n-gram model for the tests that cover all methods."""

from foredraft.drafters.method import Variant

VARIANTS = (Variant(options=lambda k: {"min_confidence": 0.01}),)
