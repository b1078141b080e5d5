"""Configurations of a DFlash head for the tests that cover all methods."""

from foredraft.drafters.method import Variant

TRAINING = {"taps": (1,), "block_size": 5, "num_layers": 1}
VARIANTS = (
    Variant(training=TRAINING),
    Variant("tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, TRAINING, is_chain=False),
)
