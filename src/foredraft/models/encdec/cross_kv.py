"""Cache of cross-attention KV: computed once per source and freed when no request refers to the source.

A source has pages in a separate pool, one slot per token. If a new source does not fit, the least recently read one is
freed, and encoded again when it is needed.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.source import EncoderSource

SOURCE_PAGE_SIZE = 16  # slots per page
FIRST_PAGE = 1  # page 0 is for padding


@dataclass(frozen=True)
class SourcePages:
    """Pages and length of one source."""

    pages: tuple[int, ...]
    num_tokens: int

    def compute_slots(self) -> Tensor:
        """Compute the slots [num_tokens] of the source in the pool."""
        return (torch.tensor(self.pages)[:, None] * SOURCE_PAGE_SIZE + torch.arange(SOURCE_PAGE_SIZE)).flatten()[
            : self.num_tokens
        ]


# Sources -> by layer keys and values [T, H, D] of all sources concatenated, and the number of tokens of each source.
EncodeSources = Callable[[Sequence[EncoderSource]], tuple[list[tuple[Tensor, Tensor]], list[int]]]


class CrossKVCache:
    """Cross-attention KV of one model.

    The last reference to a source may be dropped in any thread, so its callback only queues the source for freeing.

    Args:
        is_native: whether native code reads the pool.
        encode: computes the KV of new sources.
        capacity: returns the number of tokens above which unused sources are freed, or None = no limit. The sources of
            one forward pass are always cached together.
    """

    def __init__(self, is_native: bool, encode: EncodeSources, capacity: Callable[[], int | None]) -> None:
        self.pool = KVPool(is_native)
        self._encode = encode
        self._capacity = capacity
        # By id of the source, least recently read first.
        self._entries: dict[int, tuple[weakref.ref[EncoderSource], SourcePages]] = {}
        self._dropped_keys: deque[int] = deque()  # ids of sources that no longer exist
        self._free: list[int] = []  # free page ids
        self._num_pages = FIRST_PAGE

    @property
    def num_sources(self) -> int:
        """Number of cached sources to which a reference exists."""
        self.free_dropped()
        return len(self._entries)

    @property
    def num_slots(self) -> int:
        """Number of slots of the pool."""
        return self._num_pages * SOURCE_PAGE_SIZE

    def clear(self) -> None:
        """Drop all entries. Every source is encoded again when it is needed."""
        self.pool.clear()
        self._entries.clear()
        self._free, self._num_pages = [], FIRST_PAGE

    def free_dropped(self) -> None:
        """Free the pages of sources to which no reference exists."""
        while self._dropped_keys:
            key = self._dropped_keys.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry[0]() is None:  # a new source may have the id of a dropped one
                self._free_pages(key)

    def get_or_encode(self, sources: Sequence[EncoderSource]) -> list[SourcePages]:
        """Return the pages of each source. Sources that are not cached are encoded together."""
        self.free_dropped()
        requested = {id(source): source for source in sources}
        new = []
        for key, source in requested.items():
            entry = self._entries.pop(key, None)
            if entry is None:
                new.append(source)
            else:
                self._entries[key] = entry  # now the most recently read
        if new:
            self._encode_new(new, requested)
        return [self._entries[id(source)][1] for source in sources]

    def _encode_new(self, new: Sequence[EncoderSource], requested: dict[int, EncoderSource]) -> None:
        layers, lengths = self._encode(new)
        allocated = [self._allocate_pages(length, requested) for length in lengths]
        slots = torch.cat([pages.compute_slots() for pages in allocated])
        try:
            for layer, (keys, values) in enumerate(layers):
                self.pool.write(layer, slots.to(keys.device), keys, values, self.num_slots)
        except BaseException:
            self._free += [page for pages in allocated for page in pages.pages]
            raise
        dropped = self._dropped_keys
        for source, pages in zip(new, allocated, strict=True):
            key = id(source)
            self._entries[key] = weakref.ref(source, lambda _, key=key: dropped.append(key)), pages  # type: ignore[misc]

    def _allocate_pages(self, length: int, requested: dict[int, EncoderSource]) -> SourcePages:
        count = -(-length // SOURCE_PAGE_SIZE)
        capacity = self._capacity()
        max_pages = None if capacity is None else max(capacity // SOURCE_PAGE_SIZE, 1) + FIRST_PAGE
        while len(self._free) < count:
            idle = next((key for key in self._entries if key not in requested), None)
            if idle is not None and max_pages is not None and self._num_pages + count - len(self._free) > max_pages:
                self._free_pages(idle)
                continue
            self._free.append(self._num_pages)
            self._num_pages += 1
        self._free.sort(reverse=True)
        return SourcePages(tuple(self._free.pop() for _ in range(count)), length)

    def _free_pages(self, key: int) -> None:
        self._free += self._entries.pop(key)[1].pages


class DecoderKVPool(KVPool):
    """Self-attention KV of the decoder. Clearing it also clears the cross-attention KV."""

    cross_kv: CrossKVCache | None = None

    def get_capacity(self) -> int | None:
        """Return the capacity in tokens; None before it is set."""
        return self.capacity

    def clear(self) -> None:
        super().clear()
        if self.cross_kv is not None:
            self.cross_kv.clear()
