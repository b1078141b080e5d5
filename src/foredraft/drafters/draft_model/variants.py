"""Configurations of a draft model for the tests that cover all methods."""

from foredraft.drafters.method import VARIANT_BRANCHING, Variant

SETUP = "draft model"
PARALLEL_TREE = {"parallel": True, "tree_nodes": 8, "top_k": 3}
OTHER_TREE = {"vocab": "tli", "tree_nodes": 8, "top_k": 3}
VARIANTS = (
    Variant(setup=SETUP),
    Variant("tree", lambda k: {"branching": VARIANT_BRANCHING[:k]}, is_chain=False, has_own_parts=True, setup=SETUP),
    Variant("drafts", lambda k: {"num_drafts": 3}, is_chain=False, has_own_parts=True, setup=SETUP),
    Variant("parallel", lambda k: {"parallel": True}, has_own_parts=True, setup=SETUP),
    Variant("parallel tree", lambda k: PARALLEL_TREE, is_chain=False, setup=SETUP),
    Variant("slem", lambda k: {"vocab": "slem"}, has_own_parts=True, setup=SETUP),
    Variant("tli", lambda k: {"vocab": "tli"}, has_own_parts=True, setup=SETUP),
    Variant("tli tree", lambda k: OTHER_TREE, is_chain=False, setup=SETUP),
)
