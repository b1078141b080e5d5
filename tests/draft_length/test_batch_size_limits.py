"""Limits on draft lengths by batch size: the values that are accepted, and the drafts of an engine under them."""

from typing import Any

import pytest

from foredraft import LLM, Sampling
from foredraft.draft_length.batch_size_limits import BatchSizeLimits
from foredraft.errors import ForedraftError
from tests.support import tiny_models

TABLE = [[1, 2, 5], [3, 4, 2], [5, 8, 0]]


@pytest.mark.parametrize(
    ("num_requests", "expected"), [(1, 5), (2, 5), (3, 2), (4, 2), (5, 0), (8, 0), (9, 0), (100, 0)]
)
def test_a_table_cuts_the_draft_length_by_batch_size(num_requests: int, expected: int) -> None:
    limits = BatchSizeLimits.parse(TABLE, None)
    assert limits.cut(9, num_requests) == expected
    assert limits.cut(1, num_requests) == min(1, expected)
    assert limits.max_tokens == 5


def test_the_last_range_holds_for_larger_batches() -> None:
    assert BatchSizeLimits.parse([[1, 1, 4], [2, 3, 2]], None).cut(4, 50) == 2


def test_no_request_drafts_above_the_largest_batch() -> None:
    limits = BatchSizeLimits.parse(None, 3)
    assert [limits.cut(4, count) for count in (1, 3, 4)] == [4, 4, 0]
    assert BatchSizeLimits.parse(None, None).cut(4, 1000) == 4


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("x", "takes a list"),
        ([], "takes a list"),
        ([[1, 4]], "takes a list"),
        ([[1, 4, -1]], "takes a list"),
        ([[1, 4, True]], "takes a list"),
        ([[2, 4, 1]], "begins at 1"),
        ([[1, 4, 1], [6, 8, 1]], "begins at 5"),
        ([[1, 0, 1]], "begins at 1"),
        ([[1, 4, 0]], "one of them has to draft"),
    ],
)
def test_another_table_is_refused_with_the_form(table: Any, words: str) -> None:
    with pytest.raises(ForedraftError, match=words) as caught:
        BatchSizeLimits.parse(table, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, "8", True, 1.5])
def test_another_batch_size_is_refused(value: Any) -> None:
    with pytest.raises(ForedraftError, match="disable_by_batch_size takes a whole number from 1 up"):
        BatchSizeLimits.parse(None, value)


@pytest.mark.parametrize(
    "fields", [{"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 9, 0]]}, {"disable_by_batch_size": 2}]
)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0, max_tokens=12), Sampling(seed=5, max_tokens=12)])
def test_an_engine_drafts_within_the_limits_and_its_output_is_unchanged(
    fields: dict[str, Any], sampling: Sampling
) -> None:
    plain = tiny_models.plain()
    spec = {"method": "draft_model", "model": tiny_models.draft(), "num_speculative_tokens": 3, **fields}
    llm = plain.with_drafter(spec)
    prompts = [[5, 6, 7 + i] for i in range(4)]
    few, many = llm.generate(prompts[:2], sampling), llm.generate(prompts, sampling)
    expected = plain.generate(prompts, sampling)
    assert [c.token_ids for c in few] == [c.token_ids for c in expected[:2]]
    assert [c.token_ids for c in many] == [c.token_ids for c in expected]
    assert all(c.stats.num_drafted > 0 for c in few)
    # four requests of equal length: no step has two until the first has ended
    assert sum(c.stats.num_drafted for c in many) < sum(c.stats.num_drafted for c in few)


def test_the_table_alone_sets_the_longest_draft() -> None:
    llm = LLM(drafter={"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 1, 7], [2, 8, 1]]})
    assert llm.engine.drafter.spec.max_nodes >= 7
    assert not llm.is_adaptive
