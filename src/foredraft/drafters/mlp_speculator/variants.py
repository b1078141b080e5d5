"""Configurations of an MLP speculator for the tests that cover all methods."""

from foredraft.drafters.method import Variant

TRAINING = {"n_predict": 4, "inner": 48, "tied": False}
LSTM_TRAINING = {"n_predict": 4, "inner": 48, "cell": "lstm"}
VARIANTS = (
    Variant(training=TRAINING, learning_rate=2e-2),
    Variant("tree", lambda k: {"tree_nodes": 3 * k}, TRAINING, 2e-2, is_chain=False),
    Variant("lstm", training=LSTM_TRAINING, learning_rate=2e-2, has_own_parts=True),
)
