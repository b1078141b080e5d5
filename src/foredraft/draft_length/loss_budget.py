"""Draft-length policy for ensembles: grant the full budget while measured time saved exceeds time spent."""

from collections import Counter
from collections.abc import Sequence, Set

from foredraft.draft_length.costs import CostCurve
from foredraft.draft_length.kind_budget import KindBudget
from foredraft.draft_length.policy import DecisionReason, DraftCandidate, LengthDecision, StepReport


class LossBudgetPolicy:
    """Draft-length policy that grants full lengths while drafting saves time, and pauses drafting if it does not.

    An ensemble compares the gain of every draft with its cost itself. It has more information than survival by node:
    the member that drafts, and the length of the match. This policy only checks that drafting saves time.

    Steps with sampled requests have a time credit of their own, so drafts that lose time at one temperature do not
    pause those of greedy requests.

    Args:
        curve: time of a forward pass of the target by its number of tokens; None = learned from steps.
    """

    def __init__(self, curve: CostCurve | None = None) -> None:
        self._budgets = KindBudget(curve), KindBudget(curve)  # greedy, sampled
        self._current = self._budgets[0]

    @property
    def decision(self) -> LengthDecision:
        """Last decision."""
        return self._current.decision

    @property
    def counts(self) -> Counter[DecisionReason]:
        """Number of steps by reason."""
        return self._budgets[0].counts + self._budgets[1].counts

    @property
    def is_resting(self) -> bool:
        """Whether drafting has been paused for a while."""
        return self._current.is_resting

    @property
    def needs_observation(self) -> bool:
        """Whether the drafter observes the current step. At rest it observes none, if observing takes long."""
        return self._current.needs_observation

    def allocate(
        self, candidates: Sequence[DraftCandidate], num_pass_tokens: int, attended_tokens: int = 0
    ) -> list[int]:
        """Grant `max_nodes` to every candidate, or `min_nodes` if drafting is paused or plain decoding is measured."""
        if candidates:
            self._current = self._budgets[max(candidate.kind for candidate in candidates)]
        return self._current.allocate(candidates, num_pass_tokens)

    def repeat_none(self, num_requests: int, kinds: Set[int]) -> bool:
        """Decide for no draft again; see `DraftLengthPolicy.repeat_none`."""
        budget = self._budgets[max(kinds, default=0)]
        return budget is self._current and budget.repeat_none(num_requests)

    def record_step(self, report: StepReport) -> None:
        """Update cost, survival and time credit from a finished step."""
        self._current.record_step(report)

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots."""
        for budget in self._budgets:
            budget.forget(slots)
