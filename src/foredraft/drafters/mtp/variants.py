"""Configurations of an MTP layer for the tests that cover all methods."""

from foredraft.drafters.method import VARIANT_BRANCHING, Variant

TRAINING = {"steps": 2}
VARIANTS = (
    Variant(training=TRAINING),
    Variant("tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, TRAINING, is_chain=False),
    Variant("fixed tree", lambda k: {"branching": VARIANT_BRANCHING[:k]}, TRAINING, is_chain=False),
)
