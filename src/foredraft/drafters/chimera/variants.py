"""Configurations of Chimera heads for the tests that cover all methods."""

from foredraft.drafters.method import Variant

FIXED_BRANCHING = (3, 2, 1, 1, 2, 1, 1, 1)  # children by depth
TRAINING = {"taps": (1, -1), "steps": 4, "heads": 2}
VARIANTS = (
    Variant(training=TRAINING),
    Variant("tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, TRAINING, is_chain=False, has_own_parts=True),
    Variant("fixed tree", lambda k: {"branching": FIXED_BRANCHING[:k]}, TRAINING, is_chain=False),
    Variant("one tap", training={"taps": (1,), "steps": 3, "heads": 1}),
)
