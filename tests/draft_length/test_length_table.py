"""Bounds on draft lengths by batch size: the values that are accepted, and the drafts of an engine under them."""

from typing import Any

import pytest

from foredraft import LLM, RequestOptions, Sampling
from foredraft.draft_length.length_table import NO_LIMIT, LengthBounds, LengthTable
from foredraft.errors import ForedraftError
from tests.support import tiny_models

RANGES = [[1, 2, 5], [3, 4, 2], [5, 8, 0]]
AUTO = LengthBounds()


@pytest.mark.parametrize("table", [LengthTable.parse_vllm(RANGES, None), LengthTable.parse("1:5, 3:2, 5:0")])
def test_a_table_has_one_length_for_every_batch_size(table: LengthTable) -> None:
    expected = {1: 5, 2: 5, 3: 2, 4: 2, 5: 0, 8: 0, 9: 0, 100: 0}
    assert {count: table.find(count) for count in expected} == {count: (k, k) for count, k in expected.items()}
    assert table.most == 5
    assert table.is_fixed
    assert str(table) == "1:5,3:2,5:0"


@pytest.mark.parametrize(
    ("value", "bounds", "most"),
    [(4, (4, 4), 4), (0, (0, 0), 0), ("4", (4, 4), 4), ("2-6", (2, 6), 6), ("auto", AUTO, None), (None, AUTO, None)],
)
def test_a_single_value_holds_for_all_batch_sizes(value: Any, bounds: tuple[int, int], most: int | None) -> None:
    table = LengthTable.parse(value)
    assert table.find(1) == table.find(1000) == bounds
    assert table.most == most
    assert LengthTable.parse(str(table)) == table


def test_entries_may_be_ranges_and_auto() -> None:
    table = LengthTable.parse("1:auto,4:0-2,16:0")
    assert [table.find(count) for count in (3, 4, 15, 16)] == [AUTO, (0, 2), (0, 2), (0, 0)]
    assert not table.is_fixed
    assert table.list_ranges(8) == ((1, 3, 8), (4, 15, 2), (16, 16, 0))


def test_gaps_and_the_order_of_vllms_ranges_are_as_there() -> None:
    table = LengthTable.parse_vllm([[6, 8, 2], [1, 1, 4]], None)
    assert [table.find(count).most for count in (1, 2, 5, 6, 50)] == [4, 4, 4, 2, 2]


def test_no_request_drafts_above_the_largest_batch() -> None:
    limits = LengthTable.parse_vllm(None, 3)
    assert [limits.find(count) for count in (1, 3, 4)] == [AUTO, AUTO, (0, 0)]


@pytest.mark.parametrize(
    ("operator", "request_bounds", "expected"),
    [
        ("auto", "3", (3, 3)),
        ("auto", "2-6", (2, 6)),
        ("0-4", "2-6", (2, 4)),
        ("4", "2", (2, 2)),  # a request may always draft less
        ("2-6", "0", (0, 0)),
        ("4", "9", (4, 4)),  # and never more
        ("4", "0-9", (4, 4)),
    ],
)
def test_a_request_stays_below_the_operators_most(
    operator: str, request_bounds: str, expected: tuple[int, int]
) -> None:
    assert LengthTable.parse(operator).narrow(LengthTable.parse(request_bounds)).find(1) == expected


def test_the_longest_length_leaves_a_tree_its_nodes() -> None:
    table = LengthTable.parse("1:5,4:2-5,8:2").lift(5)
    assert [table.find(count) for count in (1, 4, 8)] == [(NO_LIMIT, NO_LIMIT), (2, NO_LIMIT), (2, 2)]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("many", "takes a number, a range such as 2-6, auto, or a table"),
        ("-1", "takes a number"),
        (-1, "takes a number"),
        (True, "takes a number"),
        (2.5, "takes a number"),
        ([1], "takes a number"),
        ("", "takes a number"),
        ("6-2", "a range is LEAST-MOST, as in 2-6"),
        ("1:6,4", "takes BATCH:TOKENS in every entry"),
        ("1:6,x:4", "takes BATCH:TOKENS in every entry"),
        ("1:6,4:x", "takes a number"),
        ("1:6,4:-2", "takes a number"),
        ("2:6,4:2", "the first batch size has to be 1"),
        ("1:6,4:2,4:1", "batch sizes rise and occur once.*4 follows 4"),
        ("1:6,8:2,4:1", "4 follows 8"),
        ("1:6,", "takes BATCH:TOKENS in every entry"),
        ("1:0,4:0", "drafts at no batch size; give 0"),
    ],
)
def test_another_value_is_refused_with_the_form(value: Any, words: str) -> None:
    with pytest.raises(ForedraftError, match=words) as caught:
        LengthTable.parse(value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("x", "takes a list"),
        ([], "takes a list"),
        ([[1, 4]], "takes a list"),
        ([[1, 4, -1]], "takes a list"),
        ([[1, 4, True]], "takes a list"),
        ([[2, 4, 1]], "begins at 1"),
        ([[1, 4, 1], [4, 8, 2]], "do not overlap, so this one begins at 5"),
        ([[1, 0, 1]], "ends where it begins or later"),
        ([[1, 4, 0]], "one of them has to draft"),
    ],
)
def test_another_list_is_refused_with_the_form(table: Any, words: str) -> None:
    with pytest.raises(ForedraftError, match=words) as caught:
        LengthTable.parse_vllm(table, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, "8", True, 1.5])
def test_another_batch_size_is_refused(value: Any) -> None:
    with pytest.raises(ForedraftError, match="disable_by_batch_size takes a whole number from 1 up"):
        LengthTable.parse_vllm(None, value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_speculative_tokens": "1:4,8:0", "num_speculative_tokens_per_batch_size": RANGES}, "two tables"),
        ({"disable_by_batch_size": 4, "speculative_disable_by_batch_size": 4}, "are one field"),
    ],
)
def test_lengths_are_given_once(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ForedraftError, match=words):
        LLM(drafter={"method": "ngram", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 9, 0]]},
        {"num_speculative_tokens": 3, "disable_by_batch_size": 2},
        {"num_speculative_tokens": "1:3,3:0"},
        {"num_speculative_tokens": "1:2-3,3:0"},
    ],
)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0, max_tokens=12), Sampling(seed=5, max_tokens=12)])
def test_an_engine_drafts_within_the_limits_and_its_output_is_unchanged(
    fields: dict[str, Any], sampling: Sampling
) -> None:
    plain = tiny_models.plain()
    llm = plain.with_drafter({"method": "draft_model", "model": tiny_models.draft(), **fields})
    prompts = [[5, 6, 7 + i] for i in range(4)]
    few, many = llm.generate(prompts[:2], sampling), llm.generate(prompts, sampling)
    expected = plain.generate(prompts, sampling)
    assert [c.token_ids for c in few] == [c.token_ids for c in expected[:2]]
    assert [c.token_ids for c in many] == [c.token_ids for c in expected]
    assert all(c.stats.num_drafted > 0 for c in few)
    # four requests of equal length: no step has two until the first has ended
    assert sum(c.stats.num_drafted for c in many) < sum(c.stats.num_drafted for c in few)


def test_a_request_sets_its_own_lengths_by_batch_size() -> None:
    llm = tiny_models.plain().with_drafter("ngram", "0-4")
    prompt, sampling = [5, 6, 7, 5, 6, 7], Sampling(temperature=0, max_tokens=16, ignore_eos=True)
    free, off = RequestOptions(num_speculative_tokens="1:3,2:0"), RequestOptions(num_speculative_tokens=0)
    assert llm.is_adaptive
    assert llm.generate([prompt], sampling, options=[free])[0].stats.num_drafted > 0
    both = llm.generate([prompt] * 2, sampling, options=[free, off])
    assert [c.stats.num_drafted for c in both] == [0, 0]


def test_the_table_alone_sets_the_longest_draft() -> None:
    for spec in (
        {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 1, 7], [2, 8, 1]]},
        {"method": "ngram", "num_speculative_tokens": "1:7,2:1"},
    ):
        llm = LLM(drafter=spec)
        assert llm.engine.drafter.spec.max_nodes >= 7
        assert not llm.is_adaptive
