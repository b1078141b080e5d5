"""Times of steps: plain steps soon after drafts are slower than plain decoding, and change no cost.

The first drafts after a pause are slower too, which is their price and not the machine's.
"""

import pytest

from foredraft.draft_length.costs import CostCurve, DraftCost
from foredraft.draft_length.online_regression import OUTLIER_SHARE
from foredraft.draft_length.plain_run import MIN_TRANSITION_STEPS
from foredraft.draft_length.policy import DraftOutcome, StepReport
from foredraft.draft_length.step_costs import MAX_RATIO, PAUSED_SLOWDOWN_SMOOTHING, PLAIN_COST_SMOOTHING, StepCosts
from foredraft.draft_length.step_times import NUM_NEW_DRAFTS, NUM_NEW_PLAIN, StepTimes, TimedStep, merge_equal_steps


def make_plain(seconds: float) -> TimedStep:
    report = StepReport(1, 1, 1, 50, 0.0, seconds, (DraftOutcome(0, 0, 0),))
    return TimedStep(report, 0, 0, 0, 0, has_fixed=False, num_accepted=0)


def make_draft(seconds: float) -> TimedStep:
    report = StepReport(1, 4, 4, 200, 0.1, seconds, (DraftOutcome(0, 3, 3, (1,)),))
    return TimedStep(report, 3, 3, 0, 0, has_fixed=False, num_accepted=1)


def test_the_first_plain_steps_after_drafts_change_no_cost_and_earn_their_allowance() -> None:
    times = StepTimes(StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost()))
    times.record(make_draft(1.3))
    cost, slowdown = times.costs.curve.predict(1, 1, 1, 50), times.costs.slowdown
    for _ in range(MIN_TRANSITION_STEPS):
        credit = times.credit.seconds
        times.record(make_plain(2.0))
        assert times.credit.seconds > credit
    assert times.costs.curve.predict(1, 1, 1, 50) == cost
    assert (times.costs.slowdown, times.costs.planner.plain_cost_ratio) == (slowdown, 1.0)
    times.record(make_plain(2.0))
    assert times.costs.curve.predict(1, 1, 1, 50) > cost


def test_the_first_drafts_after_a_pause_do_not_make_the_machine_seem_slow() -> None:
    times = StepTimes(StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost()))
    for _ in range(MIN_TRANSITION_STEPS + 4):
        times.record(make_plain(1.0))
    slowdown, pass_cost = times.costs.slowdown, times.costs.curve.predict(1, 4, 4, 200)
    for _ in range(NUM_NEW_DRAFTS):
        times.record(make_draft(2.0))
        assert times.costs.slowdown == slowdown
    assert times.costs.curve.predict(1, 4, 4, 200) > pass_cost, "their own price is learnt"
    times.record(make_draft(2.4))
    assert times.costs.slowdown > slowdown


def test_plain_steps_between_drafts_do_not_make_the_machine_seem_fast() -> None:
    """Fault: drafts then seemed faster too, so what plain steps had shown did not change the comparison."""
    times = StepTimes(StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost()))
    for _ in range(12):
        times.record(make_draft(1.3))
    slowdown, plain = times.costs.slowdown, make_plain(0.8)
    before, _ = times.costs.predict_without_drafts(plain.report, 0)
    for _ in range(NUM_NEW_PLAIN):
        times.record(plain)
        assert times.costs.slowdown == slowdown
    after, _ = times.costs.predict_without_drafts(plain.report, 0)
    assert after < 0.9 * before
    times.record(make_plain(0.6))
    assert times.costs.slowdown < slowdown


def test_one_delayed_step_moves_the_price_of_plain_steps_and_the_slowness_a_little() -> None:
    costs = StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost())
    for _ in range(20):
        costs.record(make_plain(1.0).report, 0, 0, 0, 0)
    ratio, slowdown = costs.planner.plain_cost_ratio, costs.slowdown
    costs.record(make_plain(30.0).report, 0, 0, 0, 0)
    assert MAX_RATIO < 1.0 + OUTLIER_SHARE, "otherwise the clipping of outliers is the bound"
    assert ratio < costs.planner.plain_cost_ratio <= ratio + PLAIN_COST_SMOOTHING * (MAX_RATIO - ratio) + 1e-9
    assert slowdown < costs.slowdown <= slowdown * (1.0 + PAUSED_SLOWDOWN_SMOOTHING * (MAX_RATIO - 1.0)) + 1e-9


def test_a_machine_that_becomes_slow_during_a_pause_does_not_raise_the_price_of_plain_steps_alone() -> None:
    """Fault: half of it did. With drafts the machine was fast again, and plain steps seemed 25 % too costly."""
    costs, plain = StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost()), make_plain(1.0).report
    for _ in range(30):
        costs.record(plain, 0, 0, 0, 0)
    price, slow = costs.curve.predict(1, 1, 1, 50), plain._replace(step_time=1.5)
    for _ in range(30):
        costs.record(slow, 0, 0, 0, 0)
    assert costs.slowdown * costs.curve.predict(1, 1, 1, 50) == pytest.approx(1.5, rel=0.02)
    assert costs.curve.predict(1, 1, 1, 50) < 1.15 * price
    assert costs.planner.plain_cost_ratio == pytest.approx(1.0, abs=0.02)


def test_a_pass_with_a_prompt_does_not_change_the_price_of_plain_steps() -> None:
    costs, plain = StepCosts(CostCurve([(1, 1.0), (64, 5.0)]), DraftCost()), make_plain(1.0).report
    for _ in range(20):
        costs.record(plain, 0, 0, 0, 0)
    ratio = costs.planner.plain_cost_ratio
    costs.record(plain._replace(num_pass_tokens=64, step_time=6.0), 0, 0, 0, 0)
    assert costs.planner.plain_cost_ratio == ratio


def test_a_step_without_its_drafts_is_not_priced_above_the_step_with_them() -> None:
    costs = StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost())
    report, with_drafts = make_draft(1.3).report, costs.curve.predict(1, 4, 4, 200)
    for ratio in (1.0, 5.0):
        costs.planner.plain_cost_ratio = ratio
        assert costs.predict_without_drafts(report, 3)[1] <= with_drafts
    assert costs.predict_without_drafts(report, 3)[1] == pytest.approx(with_drafts)


def test_a_step_that_changes_no_cost_is_clipped_before_it_is_paid_from_the_credit() -> None:
    times = StepTimes(StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost()))
    for step in [make_plain(1.0)] * (MIN_TRANSITION_STEPS + 4) + [make_draft(1.2)] * 12:
        times.record(step)
    credit, cost = times.credit.seconds, times.costs.curve.predict(1, 4, 4, 200)
    times.record(make_draft(12.0), changes_costs=False)
    assert credit - times.credit.seconds < 1.0
    assert times.costs.curve.predict(1, 4, 4, 200) == cost


def test_transition_steps_alone_do_not_make_the_next_drafts_new() -> None:
    times = StepTimes(StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost()))
    for step in [make_draft(1.2)] * (NUM_NEW_DRAFTS + 2) + [make_plain(1.0)] * MIN_TRANSITION_STEPS:
        times.record(step)
    slowdown = times.costs.slowdown
    times.record(make_draft(2.4))
    assert times.costs.slowdown > slowdown


def test_steps_of_one_size_become_one_and_others_keep_their_order() -> None:
    longer = make_draft(1.5)._replace(longest=4)
    steps = [make_draft(1.0), longer, make_draft(1.4)._replace(num_accepted=3), make_draft(9.0), make_plain(1.0)]
    merged = merge_equal_steps(steps)
    # 9.0 is an outlier, and counts as 1.5 times the median of 1.4
    assert [(step.num_equal, step.report.step_time) for step in merged] == [(3, 1.5), (1, 1.5), (1, 1.0)]
    assert merged[0].num_accepted == (1 + 3 + 1) / 3
    assert merged[1:] == [longer, steps[-1]]


def test_merging_does_not_make_a_size_cheaper() -> None:
    """Fault: sizes in use had the median of their times, others their mean, which is higher, so lengths stayed."""
    seconds = [1.0, 1.0, 1.0, 1.4]
    (merged,) = merge_equal_steps([make_draft(time) for time in seconds])
    assert merged.report.step_time == pytest.approx(sum(seconds) / 4)


def test_drafts_that_were_merged_right_after_a_pause_are_new() -> None:
    times = StepTimes(StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost()))
    for _ in range(MIN_TRANSITION_STEPS + 4):
        times.record(make_plain(1.0))
    slowdown = times.costs.slowdown
    (merged,) = merge_equal_steps([make_draft(2.0)] * (NUM_NEW_DRAFTS + 3))
    times.record(merged)
    assert times.costs.slowdown == slowdown
    times.record(make_draft(2.4))
    assert times.costs.slowdown > slowdown


@pytest.mark.parametrize("has_fixed", [False, True])
def test_a_merged_step_earns_what_its_steps_earn(has_fixed: bool) -> None:
    one, other = (StepTimes(StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost())) for _ in range(2))
    for times in (one, other):
        for _ in range(MIN_TRANSITION_STEPS + 2):
            times.record(make_plain(1.0))
    before = one.credit.seconds
    draft = make_draft(1.3)._replace(has_fixed=has_fixed)
    one.record(draft)
    (merged,) = merge_equal_steps([draft] * 3)
    other.record(merged)
    assert other.credit.seconds - before == pytest.approx(3 * (one.credit.seconds - before))


def test_slow_plain_steps_do_not_count_twice() -> None:
    """Fault: curve and ratio learnt the same steps, so that plain steps of 1.2 were predicted to take 1.32."""
    costs = StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost())
    predicted = []
    for step_time in [1.0] * 40 + [1.2] * 30:
        report = make_plain(step_time).report
        costs.record(report, longest=0, nodes=0, unread=0, newcomers=0, is_new=True)
        predicted.append(costs.predict_without_drafts(report, nodes=0)[0])
    assert max(predicted[45:]) < 1.25
    assert predicted[-1] == pytest.approx(1.2, rel=0.02)


def test_costs_without_drafts_leave_observing_out() -> None:
    """Fault: the time credit compared drafts with plain steps that the drafter observes."""
    costs = StepCosts(CostCurve([(1, 1.0), (8, 1.2)]), DraftCost())
    outcomes = make_plain(1.1).report.outcomes
    observed = make_plain(1.1).report._replace(draft_time=0.1)
    assert outcomes, "observing is priced per request"
    for _ in range(60):
        costs.record(observed, longest=0, nodes=0, unread=0, newcomers=0)
    assert costs.estimate_observing(observed) == pytest.approx(0.1, rel=0.05)
    for report in (observed, observed._replace(num_pass_tokens=2, num_logit_rows=2)):
        nodes = report.num_pass_tokens - 1
        assert costs.predict_without_drafts(report, nodes) == pytest.approx((1.0, 1.0), rel=0.02)
