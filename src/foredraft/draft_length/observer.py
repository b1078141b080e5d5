"""Observer of finished steps: it estimates costs, survival and unread tokens, and keeps the time credit.

Pure: no clock. Steps are counted by their reports.
"""

from collections.abc import Sequence
from typing import NamedTuple

from foredraft.draft_length.acceptance import SurvivalEstimator
from foredraft.draft_length.costs import CostCurve, DraftCost
from foredraft.draft_length.credit import DEFAULT_TERMS, CreditTerms, TimeCredit
from foredraft.draft_length.intervals import get_skipped_reports
from foredraft.draft_length.plain_run import MIN_TRANSITION_STEPS
from foredraft.draft_length.policy import DraftCandidate, StepReport
from foredraft.draft_length.step_costs import StepCosts
from foredraft.draft_length.step_times import StepTimes, TimedStep, merge_equal_steps
from foredraft.draft_length.unread import UnreadCounter
from foredraft.draft_length.warmup import WarmUp

# Drafting rests after so many steps of a pause, or at once if the time credit cannot end it earlier.
RESTING_STEPS = 64
MAX_OBSERVING_SHARE = 0.01  # of a plain step: a drafter at rest that takes more to observe it misses steps
MAX_IDLE_STEPS = 127  # reports in a row that may be skipped while no request can draft (`_skip`)
MAX_WAITING = 16  # reports that wait at most
MAX_WAITING_SHARE = 0.75  # of the time credit, which they may take together


class CurrentStep(NamedTuple):
    """Size of a step before its report."""

    num_candidates: int = 0
    has_fixed: bool = False  # drafts of fixed or least length


class FinishedStep(NamedTuple):
    """A report that waits, with the state of the observer at its time."""

    report: StepReport
    longest: int  # most nodes that one request was granted; 0 = a plain step
    step: int
    has_fixed: bool
    num_steps: int  # steps since the last report that was evaluated
    is_disturbed: bool  # soon after a rare prompt


class StepObserver:
    """Estimates from finished steps, for the policies that decide about the next.

    The pass of the target empties the caches, so the code below is slow when it runs once per step. While drafting
    pays, nothing depends on the last few steps, and their reports wait until there are MAX_WAITING of them.

    Args:
        curve: time of a forward pass of the target by its number of tokens; None = learned from steps.
        draft_cost: time of a draft; None = learned from steps.
        num_transition_steps: plain steps after drafts whose times change no cost.
        terms: limits on the lost time.

    Attributes:
        step: number of finished steps.
        warmup: first steps, which measure costs.
        is_drafting: False = paused: only probes and requests of fixed length draft. The policy sets it.
        steps_since_plain: steps with drafts since the last run of plain steps or pause.
        num_others: requests that got a token but could not draft, such as those of fixed length 0, in the last step
            whose report was evaluated. A plan includes them as requests without drafts.
    """

    def __init__(
        self,
        curve: CostCurve | None,
        draft_cost: DraftCost | None,
        num_transition_steps: int = MIN_TRANSITION_STEPS,
        terms: CreditTerms = DEFAULT_TERMS,
    ) -> None:
        costs = StepCosts(curve or CostCurve(), draft_cost or DraftCost())
        self._times = StepTimes(costs, num_transition_steps, terms)
        self.survival = SurvivalEstimator()
        self.unread = UnreadCounter()
        self.step = 0
        self.warmup = WarmUp()
        self.is_drafting = True
        self._drafted_until = 0  # last step in which `is_drafting` was true
        self.steps_since_plain = 0
        self.num_others = 0
        self._current = CurrentStep()
        self._num_unobserved = 0  # steps since the last report that was evaluated
        self._waiting: list[FinishedStep] = []

    @property
    def costs(self) -> StepCosts:
        """Costs of steps; without those whose reports wait (`settle`)."""
        return self._times.costs

    @property
    def credit(self) -> TimeCredit:
        """Time that drafting has saved and may lose again; without the steps whose reports wait."""
        return self._times.credit

    @property
    def has_fixed(self) -> bool:
        """Whether the current step has drafts of fixed or least length, so that it cannot be a plain step."""
        return self._current.has_fixed

    @property
    def is_resting(self) -> bool:
        """Whether drafting is paused, and has been or will be for RESTING_STEPS at least."""
        num_left = RESTING_STEPS - (self.step - self._drafted_until)
        is_brief = self.is_drafting or self.has_fixed or self.credit.can_resume_within(num_left)
        return self.is_paused_long or not is_brief

    @property
    def is_paused_long(self) -> bool:
        """Whether drafting has been paused for RESTING_STEPS."""
        return not self.is_drafting and self.step - self._drafted_until >= RESTING_STEPS

    @property
    def can_miss_steps(self) -> bool:
        """Whether drafting rests, and observing a step takes more than MAX_OBSERVING_SHARE of a plain step."""
        return self.is_resting and self.credit.observing_share > MAX_OBSERVING_SHARE

    @property
    def is_disturbed(self) -> bool:
        """Whether the time of the next step will not be typical, because it is soon after a prompt."""
        return self._times.prompts.is_disturbed

    @property
    def num_requests(self) -> int:
        """Requests that get a token in the current step, as far as the last steps show those that cannot draft."""
        return self._current.num_candidates + self.num_others

    def begin_plain_step(self, num_transition_steps: int) -> None:
        """Measure plain decoding in the next step, unless it is one of this many plain steps after drafts."""
        self._times.num_transition_steps = num_transition_steps
        self.steps_since_plain = 0

    def register(self, candidates: Sequence[DraftCandidate]) -> bool:
        """Register the candidates of a step, and switch to the costs of their kind: sampled if any of them is sampled.

        Returns:
            Whether the kind has changed.
        """
        survival, costs = self.survival, self.costs
        for candidate in candidates:
            survival.register(candidate.slot, candidate.kind)
        kind = max([candidate.kind for candidate in candidates], default=costs.kind)
        if kind == costs.kind:
            return False
        self.settle()
        costs.select_kind(kind)
        return True

    def begin_step(self, num_candidates: int, has_fixed: bool) -> None:
        """Set the number of candidates of the next step, and whether it has drafts of fixed or least length."""
        self._current = CurrentStep(num_candidates, has_fixed)
        if self.is_drafting or has_fixed:
            self._drafted_until = self.step

    def estimate_catch_up(self, slots: Sequence[int]) -> float:
        """Return the seconds that the drafter takes to read the unread tokens of these requests."""
        return self.costs.estimate_catch_up(*self.unread.count(slots, self.step))

    def record_step(self, report: StepReport) -> None:
        """Update cost, survival and time credit from a finished step."""
        outcomes = report.outcomes
        longest = max([o.granted_nodes for o in outcomes], default=0)
        is_disturbed = self.is_disturbed
        num_drafted = sum([o.num_drafted for o in outcomes]) if longest else 0
        self._times.prompts.record(report.num_pass_tokens - num_drafted > report.num_requests)
        if not longest and self._skip(report.is_observed):
            return
        num_steps = self._num_unobserved + 1
        self._waiting.append(FinishedStep(report, longest, self.step, self.has_fixed, num_steps, is_disturbed))
        if not can_wait(self, self._waiting):
            self.settle()
        self._num_unobserved = 0
        # After a step without candidates, its requests may become candidates, so they are not counted as others.
        num_candidates = self._current.num_candidates
        self.num_others = max(0, len(outcomes) - num_candidates) if num_candidates else 0
        self._current = self._current._replace(num_candidates=0)
        self.steps_since_plain = self.steps_since_plain + (longest > 0) if self.is_drafting else 0
        self.warmup.record_step(len(outcomes), self.credit.seconds)
        self.step += 1

    def record_paused_steps(self, num_candidates: int, reports: Sequence[StepReport]) -> None:
        """Record steps of a pause, all without drafts; as `begin_step` and `record_step` in turn, in less time."""
        self.settle()
        for report in reports:
            if self._num_unobserved >= get_skipped_reports(self.is_paused_long):
                self.begin_step(num_candidates, has_fixed=False)
                self.record_step(report)
                continue
            self._times.prompts.record(report.num_pass_tokens > report.num_requests)
            self.credit.record_skipped_step(report.is_observed)
            self._num_unobserved += 1
            self.step += 1

    def settle(self) -> None:
        """Evaluate the reports that wait, before a decision that depends on them."""
        if self._waiting:
            steps = [self._record_outcomes(finished) for finished in self._waiting]
            self._waiting.clear()
            self._times.record_all(merge_equal_steps(steps) if len(steps) > 1 else steps)

    def _record_outcomes(self, finished: FinishedStep) -> TimedStep:
        """Update survival and unread tokens, and return the step, which costs and time credit are updated from."""
        report, longest, step, has_fixed, num_steps, is_disturbed = finished
        slots = [o.slot for o in report.outcomes if o.granted_nodes > 0]  # requests that were granted a draft
        nodes = sum([o.num_drafted for o in report.outcomes])
        num_accepted = sum([len(o.accepted_nodes) for o in report.outcomes])
        unread, newcomers = self.unread.count(slots, step)
        survival = self.survival
        for o in report.outcomes:
            if o.granted_nodes > 0:
                survival.record_draft(*o)
                self.unread.record_draft(o.slot, step)
            else:
                survival.record_idle(o.slot, num_steps)
        if not longest:
            survival.record_pause(num_steps)
        return TimedStep(report, longest, nodes, unread, newcomers, has_fixed, num_accepted, num_steps, 1, is_disturbed)

    def _skip(self, is_observed: bool) -> bool:
        """Skip the report of a step without drafts, to save time, if nothing is learnt from it.

        Reports are skipped if drafting is paused, if there was no candidate, and if they come so soon after drafts that
        they change no cost. One in 16 is evaluated in a pause, one in 64 in a long one, and one in 128 without
        candidates. A skipped step only adds its allowance to the time credit. Returns whether it was skipped.
        """
        self.settle()
        num_skipped = get_skipped_reports(self.is_paused_long) if self._current.num_candidates else MAX_IDLE_STEPS
        if self._current.num_candidates and self.is_drafting:  # also during warm-up
            num_skipped = self._times.num_transition_left if self.warmup.is_over else 0
        if self._num_unobserved >= num_skipped:
            return False
        self._num_unobserved += 1
        self.step += 1
        self._current = self._current._replace(num_candidates=0)
        self.credit.record_skipped_step(is_observed)
        return True

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the estimates of these slots."""
        self.settle()
        self.survival.forget(slots)
        self.unread.forget(slots)


def can_wait(observer: StepObserver, waiting: Sequence[FinishedStep]) -> bool:
    """Return whether no decision depends on the newest report at once, and the time credit covers all that wait.

    Predictions of the drafter do not wait: they show at once that a request has become easier.
    """
    newest = waiting[-1]
    if not newest.longest or not observer.is_drafting or not observer.warmup.is_over or len(waiting) == MAX_WAITING:
        return False
    waiting_seconds = sum([finished.report.step_time for finished in waiting])
    is_covered = waiting_seconds <= MAX_WAITING_SHARE * observer.credit.available * observer.costs.slowdown
    has_predictions = any(o.confidences for o in newest.report.outcomes)
    return observer.credit.is_ample and is_covered and not has_predictions
