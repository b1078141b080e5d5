"""Configurations of prompt lookup for the tests that cover all methods."""

from foredraft.drafters.method import Variant

VARIANTS = (
    Variant(options=lambda k: {"prompt_lookup_min": 1}),
    Variant("branches", lambda k: {"prompt_lookup_min": 1, "branches": 3}, is_chain=False),
)
