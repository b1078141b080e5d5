"""Draft-length policy for ensembles: grant the full budget while measured time saved exceeds time spent."""

from collections import Counter
from collections.abc import Sequence, Set

from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.costs import CostCurve
from foredraft.draft_length.policy import DecisionReason, DraftCandidate, LengthDecision, StepReport

PLAIN_STEP_INTERVAL = 256  # steps with drafts between two plain steps, which measure the cost of plain decoding
MAX_INITIAL_LOSS_STEPS = 12.0  # time, in plain steps, that may be lost before drafting is paused for the first time
MIN_RESUME_CREDIT = 2.0  # time credit, in plain steps, that ends the first pause
MAX_RESUME_CREDIT = 8.0  # upper limit in plain steps: the credit that ends a pause doubles with every further pause


class LossBudgetPolicy:
    """Time credit of `AdaptiveLengthPolicy` without its plan, while all requests are greedy.

    An ensemble compares the gain of every draft with its cost itself. It has more information than survival by node:
    the member that drafts, and the length of the match. This policy only checks that drafting saves time, and pauses
    drafting if it does not. Steps with sampled requests use the plan, because an ensemble does not include the time of
    sampling a draft in its costs.

    Args:
        curve: time of a forward pass of the target by its number of tokens; None = learned from steps.
    """

    def __init__(self, curve: CostCurve | None = None) -> None:
        self._planned = AdaptiveLengthPolicy(curve)
        self._observer = self._planned.observer
        self._is_paused, self._resume_credit = False, 0.0

    @property
    def decision(self) -> LengthDecision:
        """Last decision."""
        return self._planned.decision

    @property
    def counts(self) -> Counter[DecisionReason]:
        """Number of steps by reason."""
        return self._planned.counts

    @property
    def is_resting(self) -> bool:
        """Whether drafting has been paused for a while."""
        return self._observer.is_resting

    def allocate(
        self, candidates: Sequence[DraftCandidate], num_pass_tokens: int, attended_tokens: int = 0
    ) -> list[int]:
        """Grant `max_nodes` to every candidate, or `min_nodes` if drafting is paused or a plain step is due."""
        if max([candidate.kind for candidate in candidates], default=0):
            return self._planned.allocate(candidates, num_pass_tokens, attended_tokens)
        self._planned.begin_unplanned_step(candidates)  # there is no plan, so no costs have to be measured first
        self._update_pause()
        self._observer.is_drafting = not self._is_paused
        reason: DecisionReason = (
            "guard"
            if self._is_paused
            else "measure"
            if self._observer.steps_since_plain >= PLAIN_STEP_INTERVAL and not self._observer.has_fixed
            else "pays"
        )
        granted = [c.max_nodes if reason == "pays" else c.min_nodes for c in candidates]
        self._planned.record_decision(LengthDecision(reason, sum(granted), max(granted, default=0)))
        return granted

    def repeat_none(self, num_requests: int, kinds: Set[int]) -> bool:
        """Return False: a step without drafts earns credit, which every decision looks at."""
        return False

    def record_step(self, report: StepReport) -> None:
        """Update cost, survival and time credit from a finished step."""
        self._observer.record_step(report)

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots."""
        self._planned.forget(slots)

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
