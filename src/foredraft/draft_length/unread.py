"""Estimate of the tokens that a drafter has not read: one for each step since a request's last draft.

Pure: steps are counted by the caller.
"""

from collections.abc import Sequence


class UnreadCounter:
    """Counter of unread tokens by slot."""

    def __init__(self) -> None:
        self._first_unread_step: dict[int, int] = {}  # slot -> step after its last draft; absent = never drafted

    def record_draft(self, slot: int, step: int) -> None:
        """Record that the drafter has read all tokens of a request in this step."""
        self._first_unread_step[slot] = step + 1

    def count(self, slots: Sequence[int], step: int) -> tuple[int, int]:
        """Return (unread tokens, newcomers) of these requests, where a newcomer is a request that never drafted.

        The prompt of a newcomer is not counted: this file does not see its length.
        """
        pauses = [step - self._first_unread_step[slot] for slot in slots if slot in self._first_unread_step]
        return sum(pauses), len(slots) - len(pauses)

    def sort_by_last_draft(self, slots: list[int], step: int) -> None:
        """Sort the slots in place: the one with the oldest draft first, those without any draft last."""
        slots.sort(key=lambda slot: self._first_unread_step.get(slot, step))

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the state of these slots."""
        for slot in slots:
            self._first_unread_step.pop(slot, None)
