"""Rows of a forward pass on a device: inputs of the modules and of the GPU kernels, copied in one transfer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.rows import PackedRows

ALIGNMENT = 4  # numbers; every list begins at a multiple of 16 bytes, so that one compiled kernel takes all of them
NUM_WIDE = 4  # leading lists of int64
START, TAIL = 4, 5  # of the lists between `write` and `logit_rows`


@dataclass(frozen=True)
class RowsLayout:
    """Places of the lists of `DeviceRows` in one block of int32 numbers."""

    lengths: tuple[int, ...]  # of the lists, in the order of the fields

    @property
    def num_numbers(self) -> int:
        """Length of the block."""
        return sum(self._round_up(i) for i in range(len(self.lengths)))

    def split(self, block: Tensor) -> list[Tensor]:
        """Return the lists of a block as views."""
        lists, at = [], 0
        for i, length in enumerate(self.lengths):
            part = block[at : at + (2 * length if i < NUM_WIDE else length)]
            lists.append(part.view(torch.int64) if i < NUM_WIDE else part)
            at += self._round_up(i)
        return lists

    def _round_up(self, i: int) -> int:
        size = 2 * self.lengths[i] if i < NUM_WIDE else self.lengths[i]
        return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class DeviceRows:
    """Packed rows on a device.

    A row sees the keys of its ranks 0 to start + tail - 1 in this order. Rank i below `start` lies in the slot that the
    page table has for it, rank start + i in slot tails[tail_at + i]. Rows of a chain share their tail, and a row of a
    tree has its own: the path from node 0 down to itself. This takes the place of a mask.
    """

    tokens: Tensor  # [T] int64 token ids
    positions: Tensor  # [T] int64
    write_slots: Tensor  # [T] int64 slots of the rows' own keys and values
    logit_rows: Tensor  # [R] int64 rows that need logits
    pages: Tensor  # page ids of all requests, one after the other; this and the next lists are int32
    page_at: Tensor  # [T] index in `pages` of the first page of the row's request
    tails: Tensor  # slots after the committed ones, in order
    tail_at: Tensor  # [T] index in `tails` of the row's first
    start: Tensor  # [T] committed tokens before node 0
    tail: Tensor  # [T] keys in the row's tail, its own included
    first_row: Tensor  # [B + 1] first row of every request, then T
    num_rows: int  # T
    num_requests: int  # B
    longest: int  # most keys that a row sees
    page_size: int

    @classmethod
    def pack(cls, rows: PackedRows, counts: Sequence[int], device: torch.device | str) -> "DeviceRows":
        """Copy packed rows to a device.

        Args:
            rows: packed rows.
            counts: [B] rows of each request, in the order of the rows.
            device: device of the kernels.
        """
        lists = list_rows(rows, counts)
        layout = RowsLayout(tuple(len(x) for x in lists))
        staging = make_staging(layout.num_numbers, device)
        for target, numbers in zip(layout.split(staging), lists, strict=True):
            target.copy_(numbers)
        views: Any = layout.split(staging.to(device, non_blocking=True))
        record = rows.record
        sizes: Any = rows.num_rows, len(counts), int(record.max_keys), int(record.page_size)
        return cls(*views, *sizes)


def list_rows(rows: PackedRows, counts: Sequence[int]) -> list[Tensor]:
    """Return the lists of `DeviceRows` on the CPU, in the order of the fields, as int32.

    Args:
        rows: packed rows.
        counts: [B] rows of each request, in the order of the rows.
    """
    first_row = [0, *accumulate(counts)]
    assert first_row[-1] == rows.num_rows, "the requests have other rows"
    tokens, write, *lists, logit_rows = torch.split(rows.numbers, list(rows.counts))
    positions = lists[START] + lists[TAIL] - 1  # a row's tail is the path from node 0 down to itself
    return [tokens, positions, write, logit_rows, *lists, torch.tensor(first_row, dtype=torch.int32)]


def make_staging(num_numbers: int, device: torch.device | str) -> Tensor:
    """Return zeros [num_numbers] int32 on the CPU, from which a copy to the device does not wait."""
    return torch.zeros(num_numbers, dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
