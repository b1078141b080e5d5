"""Configurations of an assistant for the tests that cover all methods."""

from foredraft.drafters.method import Variant

SETUP = "assistant"
VARIANTS = (
    Variant(setup=SETUP, has_own_parts=True),
    Variant("tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, is_chain=False, setup=SETUP),
    Variant("ordered", setup=SETUP),
)
