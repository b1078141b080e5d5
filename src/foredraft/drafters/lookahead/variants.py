"""Configurations of lookahead decoding for the tests that cover all methods."""

from foredraft.drafters.method import Variant

VARIANTS = (
    Variant(is_chain=False),
    Variant("window alone", lambda k: {"ngram_size": 3, "from_text": False}, is_chain=False),
)
