"""Intervals: lifetimes of plans."""

import pytest

from foredraft.draft_length.intervals import (
    CHANGED_BATCH_LIFETIME,
    LARGE_BATCH,
    LARGE_BATCH_LIFETIME,
    SMALL_BATCH_LIFETIME,
    get_plan_lifetime,
    may_hold,
)


@pytest.mark.parametrize(
    ("num_requests", "is_same_batch", "is_comparable", "longest"),
    [
        (1, True, True, SMALL_BATCH_LIFETIME),
        (LARGE_BATCH, True, True, LARGE_BATCH_LIFETIME),
        (1, False, True, CHANGED_BATCH_LIFETIME),
        (1, False, False, 0),
        (LARGE_BATCH, False, False, CHANGED_BATCH_LIFETIME),
    ],
)
def test_the_first_plans_live_for_a_quarter_of_the_steps_before_them(
    num_requests: int, is_same_batch: bool, is_comparable: bool, longest: int
) -> None:
    for step in (3, 12, 20, 1000):
        lifetime = get_plan_lifetime(num_requests, step, is_same_batch, is_comparable)
        assert lifetime == min(step // 4, longest)


def test_decisions_are_held_once_plans_of_few_requests_have_their_usual_lifetime() -> None:
    assert [may_hold(step) for step in (1, 63, 64, 1000)] == [False, False, True, True]
