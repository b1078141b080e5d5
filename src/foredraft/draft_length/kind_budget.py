"""Time credit of one kind of request: it decides whether an ensemble drafts, without a plan of lengths."""

from collections import Counter
from collections.abc import Sequence

from foredraft.draft_length.costs import CostCurve
from foredraft.draft_length.credit import CreditTerms
from foredraft.draft_length.observer import StepObserver
from foredraft.draft_length.policy import DecisionReason, DraftCandidate, LengthDecision, StepReport

PLAIN_STEP_INTERVAL = 256  # steps with drafts between two plain steps, which measure the cost of plain decoding
# the same, while the credit may soon pause drafting: a cost that is extrapolated from drafts alone can be far off
SHORT_PLAIN_INTERVAL = 8
# Without a plan the credit alone decides how long drafts are tried at the start.
TERMS = CreditTerms(initial_steps=14.0)
MAX_INITIAL_LOSS_STEPS = 12.0  # time, in plain steps, that may be lost before drafting is paused for the first time
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
        # Every plain step counts, the first ones too: without a plan nothing else limits what is lost at the start.
        self._observer = StepObserver(curve, None, num_transition_steps=0, terms=TERMS)
        self._observer.end_warmup()  # there is no plan, so no costs have to be measured first
        self._is_paused, self._resume_credit = False, 0.0
        self.decision = LengthDecision("start")
        self.counts: Counter[DecisionReason] = Counter()

    @property
    def is_resting(self) -> bool:
        """Whether drafting has been paused for a while."""
        return self._observer.is_resting

    def allocate(self, candidates: Sequence[DraftCandidate]) -> list[int]:
        """Grant `max_nodes` to every candidate, or `min_nodes` if drafting is paused or a plain step is due."""
        self._observer.begin_step(len(candidates), any(c.min_nodes for c in candidates))
        self._observer.register(candidates)
        self._update_pause()
        self._observer.is_drafting = not self._is_paused
        reason: DecisionReason = (
            "guard"
            if self._is_paused
            else "measure"
            if self._is_plain_due() and not self._observer.has_fixed
            else "pays"
        )
        granted = [c.max_nodes if reason == "pays" else c.min_nodes for c in candidates]
        self.decision = LengthDecision(reason, sum(granted), max(granted, default=0))
        self.counts[reason] += 1
        return granted

    def record_step(self, report: StepReport) -> None:
        """Update cost, survival and time credit from a finished step."""
        self._observer.record_step(report)
        self._observer.settle()  # every decision reads the credit

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots."""
        self._observer.forget(slots)

    def _is_plain_due(self) -> bool:
        credit = self._observer.credit
        is_low = credit.seconds < MAX_RESUME_CREDIT * credit.plain_step_cost
        return self._observer.steps_since_plain >= (SHORT_PLAIN_INTERVAL if is_low else PLAIN_STEP_INTERVAL)

    def _update_pause(self) -> None:
        """Pause drafting if the time credit is used up, and resume if it has grown to the resume credit."""
        credit, step_cost = self._observer.credit.seconds, self._observer.credit.plain_step_cost
        if self._is_paused:
            self._is_paused = credit <= self._resume_credit * step_cost
        elif credit < (0.0 if self._resume_credit else -MAX_INITIAL_LOSS_STEPS * step_cost):
            self._is_paused = True
            self._resume_credit = min(max(2 * self._resume_credit, MIN_RESUME_CREDIT), MAX_RESUME_CREDIT)
        elif credit > MAX_RESUME_CREDIT * step_cost:
            self._resume_credit = 0.0
