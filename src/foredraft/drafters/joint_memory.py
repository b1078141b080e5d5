"""The memories of several drafters on the same pages, as the one that the memory manager knows.

What cannot be read again decides what a prefix is worth: a hit ends where its memory does. Whoever can read again is
left to do so, unless all can; then a page counts as remembered where all of them remember it.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, cast

from foredraft.kv.memory import DraftMemory

if TYPE_CHECKING:
    from foredraft.kv.pool import KVPool


class JointValid(MutableMapping[int, int]):
    """Slot -> leading positions that are right in every one of several memories; set in all at once."""

    def __init__(self, memories: Sequence[DraftMemory]) -> None:
        self._memories = memories

    def __getitem__(self, slot: int) -> int:
        return min(memory.valid[slot] for memory in self._memories)

    def __setitem__(self, slot: int, count: int) -> None:
        for memory in self._memories:
            memory.valid[slot] = count

    def __delitem__(self, slot: int) -> None:
        for memory in self._memories:
            memory.valid.pop(slot, None)

    def __iter__(self) -> Iterator[int]:
        return (slot for slot in self._memories[0].valid if all(slot in memory.valid for memory in self._memories))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class JointPool:
    """What is asked of a pool by those who only count."""

    def __init__(self, memories: Sequence[DraftMemory]) -> None:
        self._pools = [memory.pool for memory in memories]

    @property
    def capacity(self) -> int | None:
        return self._pools[0].capacity

    @capacity.setter
    def capacity(self, slots: int | None) -> None:
        for pool in self._pools:
            pool.capacity = slots

    def clear(self) -> None:
        for pool in self._pools:
            pool.clear()


def joined(memories: Sequence[DraftMemory]) -> DraftMemory | None:
    """One memory for all; None for none."""
    if len(memories) < 2:
        return memories[0] if memories else None
    deciding = [memory for memory in memories if not memory.is_rereadable] or list(memories)

    def settle(slots: Sequence[int]) -> None:
        for memory in memories:
            memory.settle(slots)

    return DraftMemory(
        cast("KVPool", JointPool(memories)),
        sum(memory.bytes_per_token for memory in memories),
        max(memory.lookahead for memory in deciding),
        all(memory.is_rereadable for memory in memories),
        settle,
        cast(dict[int, int], JointValid(deciding)),
    )
