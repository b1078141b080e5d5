"""Where the keys and values of sources lie: made once per source, read by every pass until the source is gone.

A source's entries lie on pages of a pool of their own, one slot per token of the source. Pages come back once nobody
holds the source, or, while there is no room for a new one, from the source that was not read for the longest time: it
is encoded again when it is needed.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.source import Source

PAGE = 16
FIRST_PAGE = 1  # padding points to page 0


@dataclass(frozen=True)
class Place:
    """Where a source lies."""

    pages: tuple[int, ...]
    length: int

    def slots(self) -> Tensor:
        """[length]"""
        return (torch.tensor(self.pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()[: self.length]


# new sources -> keys and values [L, T, H, D] of each in turn, and how long each is
Encode = Callable[[Sequence[Source]], tuple[list[tuple[Tensor, Tensor]], list[int]]]


class SourceMemory:
    """One model's. Whoever drops the last reference to a source may be another thread than the one that reads."""

    def __init__(self, is_native: bool, encode: Encode, capacity: Callable[[], int | None]) -> None:
        """capacity: tokens to hold before what is not in use goes; the sources of one pass are held in any case."""
        self.pool = KVPool(is_native)
        self._encode = encode
        self._capacity = capacity
        self._held: dict[int, tuple[weakref.ref[Source], Place]] = {}  # by identity; least recently read first
        self._gone: deque[int] = deque()
        self._free: list[int] = []
        self._num_pages = FIRST_PAGE

    @property
    def num_held(self) -> int:
        """Sources that are still somebody's."""
        self.sweep()
        return len(self._held)

    @property
    def num_slots(self) -> int:
        return self._num_pages * PAGE

    def clear(self) -> None:
        """Nothing that was computed is trusted: every source is encoded again."""
        self.pool.clear()
        self._held.clear()
        self._free, self._num_pages = [], FIRST_PAGE

    def sweep(self) -> None:
        """Take back the pages of sources that are gone."""
        while self._gone:
            key = self._gone.popleft()
            held = self._held.get(key)
            if held is not None and held[0]() is None:
                self._release(key)

    def places(self, sources: Sequence[Source]) -> list[Place]:
        """Where each lies; those that do not yet are encoded, all of them together."""
        self.sweep()
        wanted = {id(source): source for source in sources}
        new = []
        for key, source in wanted.items():
            held = self._held.pop(key, None)
            if held is None:
                new.append(source)
            else:
                self._held[key] = held
        if new:
            self._take_in(new, wanted)
        return [self._held[id(source)][1] for source in sources]

    def _take_in(self, new: Sequence[Source], wanted: dict[int, Source]) -> None:
        made, lengths = self._encode(new)
        taken = [self._take(length, wanted) for length in lengths]
        slots = torch.cat([place.slots() for place in taken])
        try:
            for layer, (keys, values) in enumerate(made):
                self.pool.write(layer, slots.to(keys.device), keys, values, self.num_slots)
        except BaseException:
            self._free += [page for place in taken for page in place.pages]
            raise
        gone = self._gone
        for source, place in zip(new, taken, strict=True):
            key = id(source)
            self._held[key] = weakref.ref(source, lambda _, key=key: gone.append(key)), place  # type: ignore[misc]

    def _take(self, length: int, wanted: dict[int, Source]) -> Place:
        count = -(-length // PAGE)
        capacity = self._capacity()
        most = None if capacity is None else max(capacity // PAGE, 1) + FIRST_PAGE
        while len(self._free) < count:
            idle = next((key for key in self._held if key not in wanted), None)
            if idle is not None and most is not None and self._num_pages + count - len(self._free) > most:
                self._release(idle)
                continue
            self._free.append(self._num_pages)
            self._num_pages += 1
        self._free.sort(reverse=True)
        return Place(tuple(self._free.pop() for _ in range(count)), length)

    def _release(self, key: int) -> None:
        self._free += self._held.pop(key)[1].pages


class DecoderPool(KVPool):
    """The decoder's own keys and values; what is lost with them is the sources' too."""

    sources: SourceMemory | None = None

    def limit(self) -> int | None:
        return self.capacity

    def clear(self) -> None:
        super().clear()
        if self.sources is not None:
            self.sources.clear()
