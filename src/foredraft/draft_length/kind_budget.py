"""Time credit of one kind of request: it decides whether an ensemble drafts, without a plan of lengths."""

from collections import Counter
from collections.abc import Sequence

from foredraft.draft_length.costs import CostCurve
from foredraft.draft_length.credit import CreditTerms
from foredraft.draft_length.intervals import compute_plain_interval
from foredraft.draft_length.observer import StepObserver
from foredraft.draft_length.plain_run import PlainRun, count_run_steps
from foredraft.draft_length.policy import DecisionReason, DraftCandidate, LengthDecision, StepReport

# Without a plan the credit alone decides how long drafts are tried at the start. Without probes it alone decides when
# they are tried again, so it grows at the same rate whatever observing takes.
TERMS = CreditTerms(initial_steps=24.0, min_allowance=0.01)
MIN_RESUME_CREDIT = 2.0  # time credit, in plain steps, that ends the first pause
MAX_RESUME_CREDIT = 8.0  # upper limit in plain steps: the credit that ends a pause doubles with every further pause


class KindBudget:
    """Time credit of `AdaptiveLengthPolicy` without its plan, for steps of one kind.

    Args:
        curve: time of a forward pass of the target by its number of tokens; None = learned from steps.

    Attributes:
        decision: last decision.
        counts: number of steps by reason.
    """

    def __init__(self, curve: CostCurve | None = None) -> None:
        self._observer = StepObserver(curve, None, terms=TERMS)
        self._observer.warmup.end()  # there is no plan, so no costs have to be measured first
        self._plain_run = PlainRun()
        self._is_paused, self._resume_credit = False, 0.0
        self.decision = LengthDecision("start")
        self.counts: Counter[DecisionReason] = Counter()

    @property
    def is_resting(self) -> bool:
        """Whether drafting has been paused for a while."""
        return self._observer.is_resting

    @property
    def needs_observation(self) -> bool:
        """Whether the drafter observes the current step; see `DraftLengthPolicy.needs_observation`."""
        return not self._observer.can_miss_steps

    def allocate(self, candidates: Sequence[DraftCandidate], num_pass_tokens: int) -> list[int]:
        """Grant `max_nodes` to every candidate, or `min_nodes` if drafting is paused or plain decoding is measured.

        Args:
            candidates: requests that may draft.
            num_pass_tokens: tokens of the forward pass without drafts.
        """
        self._observer.begin_step(len(candidates), any(c.min_nodes for c in candidates))
        self._observer.register(candidates)
        if self._plain_run.adapt_to_load(len(candidates)):
            self._observer.credit.limit_at_larger_load()
        self._update_pause()
        self._observer.is_drafting = not self._is_paused
        reason = self._choose_reason(num_pass_tokens)
        granted = [c.max_nodes if reason == "pays" else c.min_nodes for c in candidates]
        self.decision = LengthDecision(reason, sum(granted), max(granted, default=0))
        self.counts[reason] += 1
        return granted

    def repeat_none(self, num_requests: int) -> bool:
        """Decide for no draft again, as in the last step; see `DraftLengthPolicy.repeat_none`."""
        if self._is_paused:
            if self.decision.reason != "guard" or self._can_resume:
                return False
        elif self.decision.reason != "measure" or not self._plain_run.take_next(
            num_requests, self._observer.is_disturbed
        ):
            return False
        if self.decision.nodes:
            return False
        self._observer.begin_step(num_requests, has_fixed=False)
        self.counts[self.decision.reason] += 1
        return True

    def record_step(self, report: StepReport) -> None:
        """Update cost, survival and time credit from a finished step."""
        self._observer.record_step(report)
        self._observer.settle()  # every decision reads the credit

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots."""
        self._observer.forget(slots)

    def _choose_reason(self, num_pass_tokens: int) -> DecisionReason:
        """Return "guard" during a pause, "measure" in a run of plain steps, and "pays" for drafts."""
        observer = self._observer
        if self._is_paused:
            return "guard"
        if observer.has_fixed:
            return "pays"
        gain, num_requests = observer.credit.gain, observer.num_requests
        confidence = observer.costs.curve.get_confidence(num_requests)
        interval = compute_plain_interval(gain, count_run_steps(gain), confidence)
        is_typical = num_pass_tokens == num_requests
        if not self._plain_run.take_step(observer.steps_since_plain, interval, gain, is_typical, observer.is_disturbed):
            return "pays"
        observer.begin_plain_step(self._plain_run.num_transition_steps)
        return "measure"

    @property
    def _can_resume(self) -> bool:
        """Whether the time credit has grown to the resume credit."""
        credit = self._observer.credit
        return credit.seconds > self._resume_credit * credit.plain_step_cost

    def _update_pause(self) -> None:
        """Pause drafting if the time credit is used up, and resume if it has grown to the resume credit."""
        credit, step_cost = self._observer.credit.seconds, self._observer.credit.plain_step_cost
        if self._is_paused:
            self._is_paused = not self._can_resume
        elif credit < 0.0:
            self._is_paused = True
            self._resume_credit = min(max(2 * self._resume_credit, MIN_RESUME_CREDIT), MAX_RESUME_CREDIT)
        elif credit > MAX_RESUME_CREDIT * step_cost:
            self._resume_credit = 0.0
