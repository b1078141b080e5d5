"""Configurations of an EAGLE head for the tests that cover all methods."""

from foredraft.drafters.method import VARIANT_BRANCHING, Variant

TRAINING = {"noise": 0.0, "steps": 2}
VARIANTS = (
    Variant(training=TRAINING),
    Variant("tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, TRAINING, is_chain=False, has_own_parts=True),
    Variant("fixed tree", lambda k: {"branching": VARIANT_BRANCHING[:k]}, TRAINING, is_chain=False),
)
