"""Rows of a native pass that stand for images, in the layout of the native code."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.cpu.records import ImagesRecord


@dataclass(frozen=True)
class NativeImageRows:
    """Rows of images of a pass. `record` is valid as long as this object lives."""

    record: ImagesRecord
    kept: tuple[Any, ...] = field(repr=False)

    @classmethod
    def from_ahead(cls, ahead: Sequence[int]) -> "NativeImageRows":
        """Pack rows without images that see rows after their own, `ahead` [T] of them."""
        return cls.pack([-1] * len(ahead), ahead, torch.empty(0, 0), (), None)

    @classmethod
    def pack(
        cls,
        index: Sequence[int],
        ahead: Sequence[int],
        states: Tensor,
        layer_states: Sequence[Tensor],
        factors: tuple[Tensor, Tensor] | None,
    ) -> "NativeImageRows":
        """Pack the rows of a pass.

        Args:
            index: [T] row of `states` in place of an embedding; -1 = none.
            ahead: [T] keys after a row's own that it sees.
            states: [n, H].
            layer_states: [n, H] by layer, added after it.
            factors: cosines and sines [T, rotary / 2] of the rows; None = those of their places.
        """
        numbers = array("i", [*index, *ahead])
        tensors = [each.detach().to(torch.float32).contiguous() for each in (states, *layer_states, *(factors or ()))]
        added = array("Q", [each.data_ptr() for each in tensors[1 : 1 + len(layer_states)]])
        base = numbers.buffer_info()[0]
        record = ImagesRecord(
            index=base,
            ahead=base + 4 * len(index),
            states=tensors[0].data_ptr(),
            cos=None if factors is None else tensors[-2].data_ptr(),
            sin=None if factors is None else tensors[-1].data_ptr(),
            added=added.buffer_info()[0] if added else None,
            num_added=len(added),
        )
        return cls(record, (numbers, added, tensors))
