"""Every causal family of transformers: it gives transformers' greedy text with drafts, or is refused by its mechanism.

The table in docs/models.md is what is expected. `python -m benchmarks.models --write docs/models.md` makes it again.
"""

from pathlib import Path

import pytest

from benchmarks.family_walk import KINDS, list_causal_families, read_outcomes, walk_family

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MAX_REFUSED = 6

OUTCOMES = read_outcomes(PAGE.read_text(encoding="utf-8"), "Decoder-only")


def test_the_page_has_every_family_that_transformers_has() -> None:
    # a new release may have families that were never tried; the page is then made again
    assert sorted(OUTCOMES) == list_causal_families()


def test_few_families_are_refused() -> None:
    refused = [o for o in OUTCOMES.values() if o.kind == "refused"]
    assert 0 < len(refused) <= MAX_REFUSED
    assert not [o for o in OUTCOMES.values() if KINDS[o.kind].startswith("fault")]


@pytest.mark.parametrize("family", list_causal_families())
def test_a_family_has_the_outcome_on_the_page(family: str, tmp_path: Path) -> None:
    outcome, expected = walk_family(family, tmp_path), OUTCOMES[family]
    assert outcome.kind == expected.kind, outcome.words
    if outcome.kind == "refused":
        assert outcome.words == expected.words
