"""Configurations of self-speculation for the tests that cover all methods."""

from foredraft.drafters.method import Variant

VARIANTS = (
    Variant(),
    Variant("tree", lambda k: {"tree_nodes": 12, "top_k": 3}, is_chain=False, has_own_parts=True),
    Variant("adapter", training={"exit_layer": 1, "rank": 24}),
)
