"""Configurations of a DFlash head for the tests that cover all methods."""

from foredraft.drafters.method import Variant

TRAINING = {"taps": (1,), "block_size": 5, "num_layers": 1}
DSPARK = TRAINING | {"block_size": 4, "predicts_from_root": True, "markov_rank": 8, "has_confidence": True}
RATE = 2e-2
VARIANTS = (
    Variant(training=TRAINING, learning_rate=RATE),
    Variant("tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, TRAINING, is_chain=False, learning_rate=RATE),
    Variant("dspark", lambda k: {"min_confidence": 0.02}, DSPARK, learning_rate=RATE),
)
