"""Scratch memory of native calls, kept from one call to the next."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScratchPool:
    """Free blocks of scratch memory. Calls in other threads take blocks of their own."""

    blocks: list[Tensor] = field(default_factory=list)

    def take(self, size: int) -> Tensor:
        """Take a block of at least `size` bytes."""
        try:
            block = self.blocks.pop()
        except IndexError:
            return torch.empty(size, dtype=torch.uint8)
        # A larger allocation than needed, so that growing sequences rarely reallocate.
        return block if len(block) >= size else torch.empty(2 * size, dtype=torch.uint8)

    def give_back(self, block: Tensor) -> None:
        """Return a block for the next call."""
        self.blocks.append(block)
