"""Configurations of an EAGLE head for the tests that cover all methods."""

from foredraft.drafters.method import Variant

FIXED_BRANCHING = (3, 2, 1, 1, 2, 1, 1, 1)  # children by depth
TRAINING = {"noise": 0.0, "steps": 2}
VARIANTS = (
    Variant(training=TRAINING),
    Variant("tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, TRAINING, is_chain=False, has_own_parts=True),
    Variant("fixed tree", lambda k: {"branching": FIXED_BRANCHING[:k]}, TRAINING, is_chain=False),
)
