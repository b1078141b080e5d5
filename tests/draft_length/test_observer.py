"""Reports that wait: nothing is lost or changed, and only steps that the time credit covers wait."""

from collections.abc import Sequence

import pytest

from foredraft.draft_length.costs import CostCurve
from foredraft.draft_length.credit import DEFAULT_TERMS, MIN_LOSS_ALLOWANCE
from foredraft.draft_length.observer import MAX_IDLE_STEPS, MAX_WAITING, RESTING_STEPS, StepObserver
from foredraft.draft_length.plain_run import MIN_TRANSITION_STEPS
from foredraft.draft_length.policy import DraftCandidate, DraftOutcome, StepReport
from foredraft.draft_length.prompt_monitor import MIN_DISTANCE, NUM_DISTURBED

PLAIN = StepReport(1, 1, 1, 50, 0.0, 1.0, (DraftOutcome(0, 0, 0),))


def draft(seconds: float, accepted: Sequence[int] = (1, 2), confidences: tuple[float, ...] = ()) -> StepReport:
    return StepReport(1, 4, 4, 200, 0.1, seconds, (DraftOutcome(0, 3, 3, tuple(accepted), confidences),))


def record(observer: StepObserver, report: StepReport) -> None:
    observer.begin_step(1, has_fixed=False)
    observer.record_step(report)


def start() -> StepObserver:
    """Return an observer after plain steps, which set the initial credit, and a few drafts."""
    observer = StepObserver(CostCurve([(1, 1.0), (8, 1.2)]), None)
    observer.register([DraftCandidate(0, 8)])
    while not observer.warmup.is_over:
        record(observer, draft(1.2) if observer.warmup.num_nodes else PLAIN)
    observer.settle()
    return observer


@pytest.mark.parametrize(("requests", "plain_steps"), [(1, 4), (2, 4), (3, 8), (16, 8)])
def test_the_start_has_more_plain_steps_with_many_requests(requests: int, plain_steps: int) -> None:
    observer = StepObserver(None, None)
    observer.register([DraftCandidate(slot, 8) for slot in range(requests)])
    outcomes = tuple(DraftOutcome(slot, 0, 0) for slot in range(requests))
    steps = 0
    while not observer.warmup.num_nodes:
        observer.begin_step(requests, has_fixed=False)
        observer.record_step(StepReport(requests, requests, requests, 50, 0.0, 1.0, outcomes))
        steps += 1
    assert steps == plain_steps


def test_steps_of_two_sizes_that_waited_leave_what_steps_added_at_once_leave() -> None:
    one, other = start(), start()
    for i in range(2):
        report = draft(1.2 + 0.05 * i, accepted=range(1, 1 + 3 * i))._replace(num_pass_tokens=4 + i)
        record(one, report)
        one.settle()
        record(other, report)
    assert one.credit.seconds != other.credit.seconds, "some steps wait"
    other.settle()
    assert one.credit.seconds == other.credit.seconds
    assert one.costs.slowdown == other.costs.slowdown
    assert one.costs.draft_cost.predict(1, 3, 3) == other.costs.draft_cost.predict(1, 3, 3)
    assert one.survival.estimate_survival([0], 5) == other.survival.estimate_survival([0], 5)
    assert one.unread.count([0], one.step) == other.unread.count([0], other.step)


def test_costs_learn_from_two_of_many_sizes_that_waited_and_in_time_from_all() -> None:
    observer, sizes = start(), (20, 20, 21, 22, 23, 24)
    known = []
    for _ in range(4):
        for size in sizes:
            record(observer, draft(1.2)._replace(num_requests=size - 3, num_pass_tokens=size))
        observer.settle()
        known.append({size for size in sizes if observer.costs.curve.get_confidence(size) > 0.0})
    assert 20 in known[0], "the size that occurs most often"
    assert [len(each) for each in known] == [2, 3, 4, 5]


def test_all_sizes_that_waited_change_credit_and_acceptance() -> None:
    one, other = start(), start()
    for i in range(10):
        report = draft(1.1 + 0.05 * (i % 3), accepted=range(1, 1 + i % 4))._replace(num_pass_tokens=4 + i)
        record(one, report)
        one.settle()
        record(other, report)
    waited = other.credit.seconds
    other.settle()
    assert abs(one.credit.seconds - waited) > 3.0
    assert other.credit.seconds == pytest.approx(one.credit.seconds, abs=0.3)
    assert one.survival.estimate_survival([0], 5) == other.survival.estimate_survival([0], 5)
    assert one.unread.count([0], one.step) == other.unread.count([0], other.step)


def test_steps_without_candidates_are_evaluated_less_often() -> None:
    """An engine without a drafter takes hardly any time for draft lengths."""
    observer, evaluated = start(), []
    for i in range(MAX_IDLE_STEPS + 1):
        before = observer.num_others
        observer.begin_step(0, has_fixed=False)
        observer.record_step(PLAIN._replace(outcomes=(DraftOutcome(i, 0, 0),)))
        evaluated += [i] if observer._num_unobserved == 0 else []
        assert observer.num_others == before
    assert evaluated == [MAX_IDLE_STEPS]


def test_steps_of_one_size_that_waited_count_as_many_steps_of_their_mean_time() -> None:
    one, other, seconds = start(), start(), [1.0, 1.25, 1.5]
    for i, step_time in enumerate(seconds):
        report = draft(step_time, accepted=range(1, 1 + i))
        record(one, report._replace(step_time=1.25))
        record(other, report)
    one.settle()
    other.settle()
    assert other.credit.seconds == one.credit.seconds
    assert other.costs.slowdown == one.costs.slowdown
    assert other.survival.estimate_survival([0], 5) == one.survival.estimate_survival([0], 5)


def test_at_most_a_few_steps_wait() -> None:
    observer = start()
    before = observer.credit.seconds = 26.0  # more than they take, and below the cap
    for _ in range(MAX_WAITING - 1):
        record(observer, draft(1.2))
        assert observer.credit.seconds == before
    record(observer, draft(1.2))
    assert observer.credit.seconds > before


@pytest.mark.parametrize("case", ["long", "poor", "paused", "predicted"])
def test_a_step_that_may_cost_much_or_is_needed_does_not_wait(case: str) -> None:
    observer = start()
    if case == "poor":
        observer.credit.seconds = 1.0
    observer.is_drafting = case != "paused"
    before = observer.credit.seconds
    record(observer, draft(20.0 if case == "long" else 1.2, confidences=(0.5,) * 3 if case == "predicted" else ()))
    assert observer.credit.seconds != before


def test_a_request_that_ended_leaves_nothing_behind() -> None:
    """Its last reports may still wait."""
    observer = start()
    record(observer, draft(1.2))
    observer.forget([0])
    observer.settle()
    assert observer.unread.count([0], observer.step) == (0, 1)
    assert not observer.survival._accepted_rates._tally_by_slot


def test_the_first_plain_steps_after_drafts_change_no_cost() -> None:
    observer = start()
    cost = observer.costs.curve.predict(1, 1, 1, 50)
    for _ in range(MIN_TRANSITION_STEPS):
        record(observer, PLAIN._replace(step_time=3.0))
    assert observer.costs.curve.predict(1, 1, 1, 50) == cost
    record(observer, PLAIN._replace(step_time=3.0))
    assert observer.costs.curve.predict(1, 1, 1, 50) > cost


def test_plain_steps_soon_after_drafts_are_not_evaluated_and_add_their_allowance() -> None:
    """Evaluating them would slow the steps after them, and plain decoding would seem slower than it is."""
    observer = start()
    record(observer, draft(1.2))
    observer.settle()
    observer.begin_plain_step(6)
    before, counts = observer.credit.seconds, []
    for _ in range(8):
        record(observer, PLAIN)
        counts.append(observer._times._num_plain)
    assert counts == [0] * 6 + [7, 8]
    earned = 8 * DEFAULT_TERMS.allowance * observer.credit.plain_step_cost
    assert observer.credit.seconds - before == pytest.approx(earned, rel=0.1)


def disturb(observer: StepObserver) -> None:
    """Record a prompt after so many steps without one that the next steps are disturbed."""
    for _ in range(MIN_DISTANCE):
        record(observer, draft(1.2))
    record(observer, PLAIN._replace(num_pass_tokens=65, step_time=5.0))
    observer.settle()
    assert observer.is_disturbed


@pytest.mark.parametrize("accepted", [(), (1, 2)])
def test_steps_soon_after_a_prompt_change_no_cost_and_the_credit_as_predicted(accepted: Sequence[int]) -> None:
    """Fault: plain steps right after a prompt, which are slow, were taken for plain decoding."""
    found = []
    for seconds in (1.2, 2.4):
        observer = start()
        disturb(observer)
        costs = observer.costs
        known = costs.curve.predict(1, 4, 4, 200), costs.draft_cost.predict(1, 3, 3), costs.slowdown
        for _ in range(NUM_DISTURBED):
            assert observer.is_disturbed
            record(observer, draft(seconds, accepted))
        observer.settle()
        assert (costs.curve.predict(1, 4, 4, 200), costs.draft_cost.predict(1, 3, 3), costs.slowdown) == known
        found.append(observer.credit.seconds)
        assert not observer.is_disturbed
        record(observer, draft(seconds, accepted))
        observer.settle()
        assert costs.slowdown != known[-1]
    assert found[0] == found[1]


def test_a_step_after_a_prompt_is_not_merged_with_others_of_its_size() -> None:
    observer = start()
    disturb(observer)
    cost = observer.costs.curve.predict(1, 4, 4, 200)
    for seconds in [1.8] * NUM_DISTURBED + [1.2] * 4:
        record(observer, draft(seconds))
    assert len(observer._waiting) > NUM_DISTURBED
    observer.settle()
    assert observer.costs.curve.predict(1, 4, 4, 200) == pytest.approx(cost, rel=0.02)


def test_a_step_with_a_prompt_does_not_postpone_the_run_of_plain_steps() -> None:
    """Fault: with short outputs a prompt comes every few dozen steps, and plain decoding was hardly measured."""
    observer = start()
    first = observer.steps_since_plain
    for step in range(100):
        record(observer, PLAIN._replace(num_pass_tokens=65) if step % 25 < 4 else draft(1.2))
    assert observer.steps_since_plain == first + 84
    observer.begin_plain_step(2)
    assert observer.steps_since_plain == 0
    for _ in range(3):
        record(observer, draft(1.2))
    assert observer.steps_since_plain == 3
    observer.is_drafting = False
    for _ in range(16):
        record(observer, PLAIN)
    assert observer.steps_since_plain == 0, "the plain steps of a pause measure the same"


@pytest.mark.parametrize(("credit_steps", "rests_at_once"), [(-0.5, True), (0.3, True), (0.4, False), (5.0, False)])
def test_drafting_rests_at_once_if_the_credit_cannot_end_the_pause_earlier(
    credit_steps: float, rests_at_once: bool
) -> None:
    """Fault: such pauses were observed for 64 steps, for 5 % of a step of `eagle3`, and no draft could follow."""
    observer = start()
    assert not observer.is_resting
    observer.is_drafting = False
    observer.credit.seconds = credit_steps * observer.credit.plain_step_cost
    for i in range(RESTING_STEPS + 1):
        assert observer.is_resting == (rests_at_once or i >= RESTING_STEPS - 1)
        assert observer.is_paused_long == (i >= RESTING_STEPS - 1)
        record(observer, PLAIN)


def test_drafting_does_not_rest_while_fixed_lengths_draft() -> None:
    observer = start()
    observer.is_drafting, observer.credit.seconds = False, 0.0
    observer.begin_step(1, has_fixed=True)
    assert not observer.is_resting
    observer.record_step(draft(1.2))
    assert not observer.is_resting
    record(observer, PLAIN)
    assert observer.is_resting


def test_a_drafter_at_rest_earns_less_only_in_steps_that_it_observes() -> None:
    """Both the reports that are skipped and the one in 16 that is evaluated."""
    earned = []
    for is_observed in (True, False):
        observer = start()
        observer.is_drafting = False
        costly = PLAIN._replace(draft_time=0.1, step_time=1.1)
        for _ in range(64):  # the drafter takes a tenth of a plain step
            record(observer, costly)
        before = observer.credit.seconds
        for _ in range(64):
            record(observer, costly if is_observed else PLAIN._replace(is_observed=False))
        earned.append((observer.credit.seconds - before) / (64 * observer.credit.plain_step_cost))
    assert earned[0] == pytest.approx(MIN_LOSS_ALLOWANCE, rel=0.2)
    assert earned[1] == pytest.approx(DEFAULT_TERMS.allowance, rel=0.02)


@pytest.mark.parametrize("num_before", [0, 5, 14, 90, 120])
def test_steps_of_a_pause_that_are_recorded_together_leave_what_single_ones_leave(num_before: int) -> None:
    one, other = start(), start()
    reports = [PLAIN._replace(step_time=1.0 + 0.01 * i, is_observed=i % 3 > 0) for i in range(14)]
    reports[4] = reports[4]._replace(num_pass_tokens=65)
    for observer in (one, other):
        observer.is_drafting = False
        observer.credit.record_step(1.0, 1.0, observing=0.05)  # observed steps earn less from now on
        for _ in range(num_before):
            record(observer, PLAIN)
    one.record_paused_steps(1, reports)
    for report in reports:
        record(other, report)
    assert one.step == other.step
    assert one.credit.seconds == other.credit.seconds
    assert one.is_disturbed == other.is_disturbed
    assert one.costs.curve.predict(1, 1, 1, 50) == other.costs.curve.predict(1, 1, 1, 50)
    assert one._num_unobserved == other._num_unobserved
