"""Configurations of token recycling for the tests that cover all methods."""

from foredraft.drafters.method import Variant

VARIANTS = (
    Variant(is_chain=False),
    Variant("small", lambda k: {"top_k": 2, "nodes": 6}, is_chain=False),
)
