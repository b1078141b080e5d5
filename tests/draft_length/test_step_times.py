"""Steps whose times wait: nothing is lost or changed, and only short steps wait while the credit is ample."""

from collections.abc import Sequence

import pytest

from foredraft.draft_length.costs import CostCurve, DraftCost
from foredraft.draft_length.policy import DraftOutcome, StepReport
from foredraft.draft_length.step_costs import StepCosts
from foredraft.draft_length.step_times import MAX_WAITING, StepTimes, TimedStep

PLAIN = TimedStep(StepReport(1, 1, 1, 50, 0.0, 1.0, (DraftOutcome(0, 0, 0),)), 0, 0, 0, 0, False)


def draft(seconds: float, accepted: Sequence[int] = (1, 2)) -> TimedStep:
    report = StepReport(1, 4, 4, 200, 0.1, seconds, (DraftOutcome(0, 3, 3, tuple(accepted)),))
    return TimedStep(report, 3, 3, 0, 0, False)


def start() -> StepTimes:
    """Return the times after a plain step, which sets the initial credit."""
    times = StepTimes(StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost()))
    times.record(PLAIN, can_wait=False)
    return times


def test_steps_that_waited_leave_what_steps_added_at_once_leave():
    one, other = start(), start()
    for i in range(10):
        step = draft(1.2 + 0.05 * (i % 3), accepted=range(1, i % 4))
        one.record(step, can_wait=False)
        other.record(step, can_wait=True)
    assert one.credit.seconds != other.credit.seconds, "two steps wait"
    other.settle()
    assert one.credit.seconds == other.credit.seconds
    assert one.costs.slowdown == other.costs.slowdown
    assert one.costs.draft_cost.predict(1, 3, 3) == other.costs.draft_cost.predict(1, 3, 3)


def test_at_most_a_few_steps_wait():
    times, before = start(), start().credit.seconds
    for _ in range(MAX_WAITING - 1):
        times.record(draft(1.2), can_wait=True)
        assert times.credit.seconds == before
    times.record(draft(1.2), can_wait=True)
    assert times.credit.seconds > before


@pytest.mark.parametrize("case", ["long", "poor", "urgent"])
def test_a_step_that_may_cost_much_or_is_needed_does_not_wait(case: str):
    times = start()
    if case == "poor":
        times.credit.seconds = 1.0
    before = times.credit.seconds
    times.record(draft(4.0 if case == "long" else 1.2), can_wait=case != "urgent")
    assert times.credit.seconds != before
