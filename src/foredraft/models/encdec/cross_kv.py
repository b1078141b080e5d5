"""Cross-attention KV of sources: computed once per source, read by every pass until the source is dropped.

A source's entries lie on pages of a pool of their own, one slot per token of the source. Pages are freed once no
request holds the source. If a new source does not fit, the least recently read one is freed and encoded again later.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.source import EncoderSource

SOURCE_PAGE_SIZE = 16
FIRST_PAGE = 1  # padding points to page 0


@dataclass(frozen=True)
class SourcePages:
    """Pages and length of one source."""

    pages: tuple[int, ...]
    num_tokens: int

    def compute_slots(self) -> Tensor:
        """[length]"""
        return (torch.tensor(self.pages)[:, None] * SOURCE_PAGE_SIZE + torch.arange(SOURCE_PAGE_SIZE)).flatten()[
            : self.num_tokens
        ]


# new sources -> keys and values [L, T, H, D] of each in turn, and how long each is
EncodeSources = Callable[[Sequence[EncoderSource]], tuple[list[tuple[Tensor, Tensor]], list[int]]]


class CrossKVCache:
    """Cross-attention KV of one model. The last reference to a source may be dropped by another thread than the
    reader."""

    def __init__(self, is_native: bool, encode: EncodeSources, capacity: Callable[[], int | None]) -> None:
        """capacity: tokens to hold before what is not in use goes; the sources of one pass are held in any case."""
        self.pool = KVPool(is_native)
        self._encode = encode
        self._capacity = capacity
        self._entries: dict[
            int, tuple[weakref.ref[EncoderSource], SourcePages]
        ] = {}  # by identity; least recently read first
        self._dropped_keys: deque[int] = deque()
        self._free: list[int] = []
        self._num_pages = FIRST_PAGE

    @property
    def num_sources(self) -> int:
        """Sources that are still somebody's."""
        self.free_dropped()
        return len(self._entries)

    @property
    def num_slots(self) -> int:
        return self._num_pages * SOURCE_PAGE_SIZE

    def clear(self) -> None:
        """Nothing that was computed is trusted: every source is encoded again."""
        self.pool.clear()
        self._entries.clear()
        self._free, self._num_pages = [], FIRST_PAGE

    def free_dropped(self) -> None:
        """Take back the pages of sources that are gone."""
        while self._dropped_keys:
            key = self._dropped_keys.popleft()
            held = self._entries.get(key)
            if held is not None and held[0]() is None:
                self._free_pages(key)

    def get_or_encode(self, sources: Sequence[EncoderSource]) -> list[SourcePages]:
        """Return the pages of each source. Missing sources are encoded together."""
        self.free_dropped()
        wanted = {id(source): source for source in sources}
        new = []
        for key, source in wanted.items():
            held = self._entries.pop(key, None)
            if held is None:
                new.append(source)
            else:
                self._entries[key] = held
        if new:
            self._encode_new(new, wanted)
        return [self._entries[id(source)][1] for source in sources]

    def _encode_new(self, new: Sequence[EncoderSource], requested: dict[int, EncoderSource]) -> None:
        made, lengths = self._encode(new)
        taken = [self._allocate_pages(length, requested) for length in lengths]
        slots = torch.cat([place.compute_slots() for place in taken])
        try:
            for layer, (keys, values) in enumerate(made):
                self.pool.write(layer, slots.to(keys.device), keys, values, self.num_slots)
        except BaseException:
            self._free += [page for place in taken for page in place.pages]
            raise
        gone = self._dropped_keys
        for source, place in zip(new, taken, strict=True):
            key = id(source)
            self._entries[key] = weakref.ref(source, lambda _, key=key: gone.append(key)), place  # type: ignore[misc]

    def _allocate_pages(self, length: int, requested: dict[int, EncoderSource]) -> SourcePages:
        count = -(-length // SOURCE_PAGE_SIZE)
        capacity = self._capacity()
        most = None if capacity is None else max(capacity // SOURCE_PAGE_SIZE, 1) + FIRST_PAGE
        while len(self._free) < count:
            idle = next((key for key in self._entries if key not in requested), None)
            if idle is not None and most is not None and self._num_pages + count - len(self._free) > most:
                self._free_pages(idle)
                continue
            self._free.append(self._num_pages)
            self._num_pages += 1
        self._free.sort(reverse=True)
        return SourcePages(tuple(self._free.pop() for _ in range(count)), length)

    def _free_pages(self, key: int) -> None:
        self._free += self._entries.pop(key)[1].pages


class DecoderKVPool(KVPool):
    """The decoder's own keys and values; what is lost with them is the sources' too."""

    cross_kv: CrossKVCache | None = None

    def get_capacity(self) -> int | None:
        return self.capacity

    def clear(self) -> None:
        super().clear()
        if self.cross_kv is not None:
            self.cross_kv.clear()
