"""Configurations of ensembles for the tests that cover all methods."""

from foredraft.drafters.method import Variant

SETUP = "members"  # `parts` are names of other cases, such as "eagle, tree", or "draft_model, other weights"
VARIANTS = (
    Variant(options=lambda k: {"parts": ("ngram", "draft_model"), "mode": "auto"}, setup=SETUP),
    Variant("with a head", lambda k: {"parts": ("suffix", "eagle3"), "mode": "auto"}, setup=SETUP),
    Variant("merged", lambda k: {"parts": ("suffix", "eagle3"), "mode": "merge"}, setup=SETUP),
    Variant(
        "merged trees",
        lambda k: {"parts": ("ngram, branches", "medusa, tree"), "mode": "merge"},
        is_chain=False,
        has_own_parts=True,
        setup=SETUP,
    ),
    Variant(
        "two memories", lambda k: {"parts": ("eagle", "draft_model"), "mode": "merge"}, has_own_parts=True, setup=SETUP
    ),
    Variant(
        "two models",
        lambda k: {"parts": ("draft_model", "draft_model, other weights"), "mode": "merge"},
        has_own_parts=True,
        setup=SETUP,
    ),
    Variant(
        "three models",
        lambda k: {"parts": ("draft_model, tree", "draft_model", "draft_model, other weights"), "mode": "merge"},
        is_chain=False,
        setup=SETUP,
    ),
    Variant("sequence", lambda k: {"parts": ("ngram_lm", "mlp_speculator"), "mode": "sequence"}, setup=SETUP),
)
