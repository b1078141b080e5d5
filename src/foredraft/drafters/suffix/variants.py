"""Configurations of suffix decoding for the tests that cover all methods."""

from foredraft.drafters.method import Variant

VARIANTS = (
    Variant(options=lambda k: {"min_confidence": 0.01}),
    Variant("store", lambda k: {"min_confidence": 0.01, "store_tokens": 1024}, has_own_parts=True),
    Variant("tree", lambda k: {"min_confidence": 0.01, "tree_nodes": 12, "top_k": 3}, is_chain=False),
)
