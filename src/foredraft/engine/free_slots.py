"""Slots of running requests that are free."""

import heapq
from collections.abc import Iterable


class FreeSlots:
    """Free slots, lowest first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reset()

    def reset(self) -> None:
        """Make all slots free."""
        self._heap = list(range(self.num_slots))

    def take(self) -> int:
        """Return the lowest free slot, which then is not free."""
        return heapq.heappop(self._heap)

    def give_back(self, slot: int) -> None:
        """Make a slot free again."""
        heapq.heappush(self._heap, slot)

    def check(self, taken: Iterable[int] = ()) -> None:
        """Assert that exactly the taken slots are not free."""
        assert sorted([*taken, *self._heap]) == list(range(self.num_slots)), "a slot was lost or assigned twice"

    def check_all_free(self) -> None:
        """Assert, in constant time, that no slot is taken."""
        assert len(self._heap) == self.num_slots, "a slot was lost or assigned twice"
