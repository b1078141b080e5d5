"""The cost curve: as many points as there is time for, and nothing of the engine's left in use."""

import itertools

import pytest
import torch

from foredraft.engine.calibrate import ROW_COUNTS, measure_pass_times, spread_tokens
from foredraft.kv.allocator import PageAllocator
from foredraft.models.recorded_pass import RecordedPasses
from tests.support import tiny_models


def test_every_number_of_rows_is_timed_and_the_pages_come_back() -> None:
    llm = tiny_models.plain()
    ticks = itertools.count()
    allocator = PageAllocator(100, 16)
    points = measure_pass_times(
        llm.target, allocator, torch.device("cpu"), max_seconds=1e9, clock=lambda: float(next(ticks))
    )
    assert [rows for rows, _ in points] == list(ROW_COUNTS)
    assert all(seconds == 1.0 for _, seconds in points), "one tick between the two readings of every pass"
    assert allocator.num_free == 99


def test_a_target_with_row_buckets_is_measured_at_these_and_priced_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedPasses, "row_buckets", (1, 4, 16))
    llm = tiny_models.plain().with_drafter("ngram")
    seconds = dict(llm.calibrate())
    assert list(seconds) == [1, 4, 16]
    curve = llm.engine.length_policy.curve
    assert [curve.interpolate(rows) for rows in (3, 4, 5, 16)] == [seconds[rows] for rows in (4, 4, 16, 16)]


def test_it_stops_where_the_time_is_spent() -> None:
    llm = tiny_models.plain()
    ticks = itertools.count()
    points = measure_pass_times(
        llm.target, PageAllocator(100, 16), torch.device("cpu"), 20.0, lambda: float(next(ticks))
    )
    assert 0 < len(points) < len(ROW_COUNTS)


def test_a_pool_too_small_gives_no_curve() -> None:
    assert measure_pass_times(tiny_models.plain().target, PageAllocator(2, 4), torch.device("cpu")) == []


def test_the_rows_are_different_tokens_of_the_vocabulary() -> None:
    """Equal tokens would choose equal experts, and a mixture would seem to cost the same with more rows."""
    tokens = spread_tokens(256, 1000)
    assert len(set(tokens)) == 256
    assert min(tokens) >= 0
    assert max(tokens) < 1000
    assert spread_tokens(3, 2) == [1, 0, 1]
