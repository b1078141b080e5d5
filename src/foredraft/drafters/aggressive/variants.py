"""Configurations of aggressive decoding for the tests that cover all methods."""

from foredraft.drafters.method import Variant

SETUP = "edited source"  # the target's own output with some tokens changed and some left out
VARIANTS = (
    Variant(setup=SETUP),
    Variant("branches", lambda k: {"branches": 3, "tokens_per_match": 2}, is_chain=False, setup=SETUP),
    Variant("prompt", lambda k: {"source": "prompt"}, setup=SETUP),
)
