"""Rows of a forward pass in the layout of the GPU kernels: one int32 array on the device, copied in one transfer."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from foredraft.kernels.rows import PackedRows

ALIGNMENT = 4  # numbers; every list begins at a multiple of 16 bytes, so that one compiled kernel takes all of them
PAGES, PAGE_AT, TAILS, TAIL_AT, START, TAIL = range(2, 8)  # lists of `PackedRows.numbers`


@dataclass(frozen=True)
class DeviceRows:
    """Packed rows on a device.

    A row sees the keys of its ranks 0 to start + tail - 1 in this order. Rank i below `start` lies in the slot that the
    page table has for it, rank start + i in slot tails[tail_at + i]. Rows of a chain share their tail, and a row of a
    tree has its own: the path from node 0 down to itself. This takes the place of a mask.
    """

    pages: Tensor  # page ids of all requests, one after the other
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
        lists = torch.split(rows.numbers, list(rows.counts))[PAGES : TAIL + 1]
        parts = [*lists, torch.tensor(first_row, dtype=torch.int32)]
        ends = list(accumulate(-(-len(part) // ALIGNMENT) * ALIGNMENT for part in parts))
        is_cuda = torch.device(device).type == "cuda"
        staging = torch.zeros(ends[-1], dtype=torch.int32, pin_memory=is_cuda)
        starts = [0, *ends[:-1]]
        for part, at in zip(parts, starts, strict=True):
            staging[at : at + len(part)] = part
        block = staging.to(device, non_blocking=True)
        views = [block[at : at + len(part)] for part, at in zip(parts, starts, strict=True)]
        record = rows.record
        pages, page_at, tails, tail_at, start, tail, first = views
        return cls(
            pages, page_at, tails, tail_at, start, tail, first,
            rows.num_rows, len(counts), int(record.max_keys), int(record.page_size),
        )  # fmt: skip
