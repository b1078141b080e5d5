"""Configurations of Hydra heads for the tests that cover all methods."""

from foredraft.drafters.method import Variant

TRAINING = {"heads": 4}
LEAN_TRAINING = {"heads": 4, "layers": 2, "own_head": False, "rank": 24}
PREFIX_TRAINING = {"heads": 4, "prefix": True}
VARIANTS = (
    Variant(training=TRAINING, learning_rate=2e-2),
    Variant("tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, TRAINING, 2e-2, is_chain=False),
    Variant("lean tree", lambda k: {"tree_nodes": 3 * k}, LEAN_TRAINING, 2e-2, is_chain=False),
    Variant("prefix", training=PREFIX_TRAINING),
    Variant(
        "prefix tree", lambda k: {"tree_nodes": 3 * k, "top_k": 3}, PREFIX_TRAINING, is_chain=False, has_own_parts=True
    ),
)
