"""Times of steps: a plain step soon after drafts is slower than plain decoding, and changes no cost."""

from foredraft.draft_length.costs import CostCurve, DraftCost
from foredraft.draft_length.plain_run import NUM_TRANSITION_STEPS
from foredraft.draft_length.policy import DraftOutcome, StepReport
from foredraft.draft_length.step_costs import StepCosts
from foredraft.draft_length.step_times import StepTimes, TimedStep


def make_plain(seconds: float) -> TimedStep:
    report = StepReport(1, 1, 1, 50, 0.0, seconds, (DraftOutcome(0, 0, 0),))
    return TimedStep(report, 0, 0, 0, 0, has_fixed=False)


def make_draft(seconds: float) -> TimedStep:
    report = StepReport(1, 4, 4, 200, 0.1, seconds, (DraftOutcome(0, 3, 3, (1,)),))
    return TimedStep(report, 3, 3, 0, 0, has_fixed=False)


def test_the_first_plain_steps_after_drafts_change_no_cost_and_earn_their_allowance() -> None:
    times = StepTimes(StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost()))
    times.record(make_draft(1.3))
    cost, slowdown = times.costs.curve.predict(1, 1, 1, 50), times.costs.slowdown
    for _ in range(NUM_TRANSITION_STEPS):
        credit = times.credit.seconds
        times.record(make_plain(2.0))
        assert times.credit.seconds > credit
    assert times.costs.curve.predict(1, 1, 1, 50) == cost
    assert (times.costs.slowdown, times.costs.planner.plain_cost_ratio) == (slowdown, 1.0)
    times.record(make_plain(2.0))
    assert times.costs.curve.predict(1, 1, 1, 50) > cost
