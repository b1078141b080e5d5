"""Memory for weights. Streaming them is most of a pass, and on huge pages it runs half as fast again."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHUNK = 64 << 20
ALIGNMENT = 64


@dataclass
class Arena:
    """Hands out pieces of large mappings; they live as long as a tensor made of them does."""

    _chunk: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    _used: int = 0

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to a cache line."""
        size = dtype.itemsize * math.prod(shape)
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + size > len(self._chunk):
            self._chunk, start = _mapping(max(CHUNK, size)), 0
        self._used = start + size
        return self._chunk[start : start + size].view(dtype).view(shape)

    def copy(self, source: Tensor) -> Tensor:
        """The same numbers, contiguous, in this memory."""
        return self.empty(*source.shape, dtype=source.dtype).copy_(source)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in a mapping of its own."""
    size = dtype.itemsize * math.prod(shape)
    return _mapping(size)[:size].view(dtype).view(*shape) if size else torch.zeros(*shape, dtype=dtype)


def _mapping(size: int) -> Tensor:
    """Bytes, all zero."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return torch.zeros(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has other pages
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
