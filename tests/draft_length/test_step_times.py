"""Times of steps: a plain step soon after drafts is slower than plain decoding, and changes no cost."""

from foredraft.draft_length.costs import CostCurve, DraftCost
from foredraft.draft_length.policy import DraftOutcome, StepReport
from foredraft.draft_length.step_costs import StepCosts
from foredraft.draft_length.step_times import StepTimes, TimedStep


def make_plain(seconds: float, is_transition: bool) -> TimedStep:
    report = StepReport(1, 1, 1, 50, 0.0, seconds, (DraftOutcome(0, 0, 0),))
    return TimedStep(report, 0, 0, 0, 0, has_fixed=False, is_transition=is_transition)


def test_a_transition_changes_no_cost_and_earns_its_allowance() -> None:
    times = StepTimes(StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost()))
    times.record(make_plain(1.0, is_transition=False))
    cost, credit = times.costs.curve.predict(1, 1, 1, 50), times.credit.seconds
    for _ in range(5):
        times.record(make_plain(2.0, is_transition=True))
    assert times.costs.curve.predict(1, 1, 1, 50) == cost
    assert times.costs.slowdown == times.costs.planner.plain_cost_ratio == 1.0
    assert times.credit.seconds > credit
    times.record(make_plain(2.0, is_transition=False))
    assert times.costs.curve.predict(1, 1, 1, 50) > cost
