"""Configurations of Medusa heads for the tests that cover all methods."""

from foredraft.drafters.method import Variant

TRAINING = {"heads": 4, "layers": 2}
VARIANTS = (
    Variant(training=TRAINING, learning_rate=2e-2),
    Variant("tree", lambda k: {"tree_nodes": 3 * k}, TRAINING, 2e-2, is_chain=False),
)
