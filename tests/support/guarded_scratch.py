"""Scratch memory of exactly the requested size, and a check that no native call writes behind it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from foredraft.kernels.scratch import ScratchPool

GUARD_BYTES, GUARD = 1 << 14, 0xA5  # length and value of the memory behind a block


@contextmanager
def guard_scratch() -> Iterator[list[int]]:
    """Replace all scratch memory; yields the sizes of the blocks behind which a call wrote."""
    overrun: list[int] = []

    def take(pool: ScratchPool, size: int) -> Tensor:
        block = torch.empty(size + GUARD_BYTES, dtype=torch.uint8)
        block[size:] = GUARD
        return block[:size]

    def give_back(pool: ScratchPool, block: Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8).set_(block.untyped_storage())
        if not bool((whole[len(block) :] == GUARD).all()):
            overrun.append(len(block))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScratchPool, "take", take)
        patch.setattr(ScratchPool, "give_back", give_back)
        yield overrun
