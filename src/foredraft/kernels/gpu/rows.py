"""Rows of a forward pass on a device: inputs of the modules and of the GPU kernels, copied in one transfer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.rows import PackedRows

ALIGNMENT = 4  # numbers; every list begins at a multiple of 16 bytes, so that one compiled kernel takes all of them
START, TAIL = 4, 5  # of the lists between `write` and `logit_rows`


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
        first_row = [0, *accumulate(counts)]
        assert first_row[-1] == rows.num_rows, "the requests have other rows"
        tokens, write, *lists, logit_rows = torch.split(rows.numbers, list(rows.counts))
        positions = lists[START] + lists[TAIL] - 1  # a row's tail is the path from node 0 down to itself
        parts = [part.long() for part in (tokens, positions, write, logit_rows)]
        views: Any = _copy_parts([*parts, *lists, torch.tensor(first_row, dtype=torch.int32)], device)
        record = rows.record
        sizes: Any = rows.num_rows, len(counts), int(record.max_keys), int(record.page_size)
        return cls(*views, *sizes)


def _copy_parts(parts: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copy lists of int32 and int64 numbers to a device in one transfer, each to an aligned address of one block."""
    numbers = [part.view(torch.int32) for part in parts]
    ends = list(accumulate(-(-len(part) // ALIGNMENT) * ALIGNMENT for part in numbers))
    starts = [0, *ends[:-1]]
    staging = torch.zeros(ends[-1], dtype=torch.int32, pin_memory=torch.device(device).type == "cuda")
    for part, at in zip(numbers, starts, strict=True):
        staging[at : at + len(part)] = part
    block = staging.to(device, non_blocking=True)
    return [
        block[at : at + len(number)].view(part.dtype) for part, number, at in zip(parts, numbers, starts, strict=True)
    ]
