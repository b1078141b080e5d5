"""Configurations of an EAGLE-3 head for the tests that cover all methods."""

from foredraft.drafters.method import Variant

TRAINING = {"taps": (1,), "steps": 2}
VARIANTS = (
    Variant(training=TRAINING),
    Variant("tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, TRAINING, is_chain=False),
    Variant("parallel", training=TRAINING | {"steps": 4, "parallel": True}),
    Variant("few tokens", training=TRAINING | {"draft_vocab_size": 60}, has_own_parts=True),
)
