"""Configurations of Chimera heads for the tests that cover all methods."""

from foredraft.drafters.method import VARIANT_BRANCHING, Variant

TRAINING = {"taps": (1, -1), "steps": 4, "heads": 2}
VARIANTS = (
    Variant(training=TRAINING),
    Variant("tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, TRAINING, is_chain=False, has_own_parts=True),
    Variant("fixed tree", lambda k: {"branching": VARIANT_BRANCHING[:k]}, TRAINING, is_chain=False),
    Variant("one tap", training={"taps": (1,), "steps": 3, "heads": 1}),
)
