"""Steps of a pause whose decision is known ahead, so that deciding and recording them takes next to nothing.

The pass of the target empties the caches, so code that runs once per step takes several times as long as in a loop. The
reports of a spell are recorded together after it.
"""

from collections.abc import Set

from foredraft.draft_length.policy import StepReport


class QuietSpell:
    """Next steps without drafts, for a batch of one size, and their reports.

    Attributes:
        num_requests: requests of every step.
        needs_observation: whether the drafter observes the steps.
        is_taken: whether the current step belongs to the spell.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.needs_observation = True
        self.is_taken = False
        self._kinds: Set[int] = frozenset()  # of the requests
        self._left = 0
        self._reports: list[StepReport] = []

    def begin(self, num_requests: int, kinds: Set[int], num_steps: int, needs_observation: bool = True) -> None:
        """Begin a spell of so many steps."""
        self.num_requests, self._kinds, self._left = num_requests, kinds, num_steps
        self.needs_observation = needs_observation

    def take_step(self, num_requests: int, kinds: Set[int]) -> bool:
        """Return whether the next step belongs to the spell."""
        if not self._left or num_requests != self.num_requests or kinds != self._kinds:
            return False
        self._left -= 1
        self.is_taken = True
        return True

    def keep(self, report: StepReport) -> bool:
        """Keep the report of the current step if it belongs to the spell, and return whether it does."""
        if not self.is_taken:
            return False
        self.is_taken = False
        self._reports.append(report)
        return True

    def end(self) -> list[StepReport]:
        """End the spell. Returns the reports of its steps, in order."""
        self._left, self.is_taken = 0, False
        reports, self._reports = self._reports, []
        return reports
