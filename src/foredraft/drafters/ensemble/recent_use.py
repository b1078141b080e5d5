"""Steps in which the members of an ensemble last drafted."""

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_UNREAD_STEPS = 4  # steps without a draft; beyond, the time of a draft measures catching up, not drafting


@dataclass
class RecentUse:
    """Step of the last draft of every member, by slot."""

    num_steps: int = 0
    last_steps: dict[tuple[int, int], int] = field(default_factory=dict)  # (member, slot) -> step of its last draft

    def record(self, member: int, slot: int) -> None:
        self.last_steps[member, slot] = self.num_steps

    def is_fresh(self, member: int, slot: int) -> bool:
        """Return whether the member drafted for this slot so recently that it has few tokens to catch up with."""
        return self.num_steps - self.last_steps.get((member, slot), -MAX_UNREAD_STEPS - 1) <= MAX_UNREAD_STEPS

    def forget(self, slots: Sequence[int]) -> None:
        self.last_steps = {key: step for key, step in self.last_steps.items() if key[1] not in slots}
