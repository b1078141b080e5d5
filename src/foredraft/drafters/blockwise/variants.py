"""Configurations of blockwise heads for the tests that cover all methods."""

from foredraft.drafters.method import Variant

VARIANTS = (Variant(training={"heads": 4, "inner": 16}),)
