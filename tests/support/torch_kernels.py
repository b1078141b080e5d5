"""The GPU kernels in torch's operators, row by row, in any precision: for tests of code that needs kernels of a pool.

A slot below 0 is never written, and reading one is an error. They keep no mask and no span: all that they see is
`DeviceRows`, as the Triton kernels.
"""

from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.gpu.loading import GPUKernels
from foredraft.kernels.gpu.rows import DeviceRows


class TorchKernels(GPUKernels):
    """GPUKernels that take tensors of every type."""

    def can_attend(self, query: Tensor, keys: Tensor, values: Tensor) -> bool:
        return True


def attend(
    query: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, scale: float, window: int, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    assert softcap == 0
    assert sinks is None
    assert rows.first_row.tolist() == sorted(rows.first_row.tolist())
    group, out = query.shape[1] // keys.shape[1], []
    first_rows = [int(rows.first_row[b]) for b in range(rows.num_requests) for _ in range(_count_rows(rows, b))]
    for row, first in enumerate(first_rows):
        start = int(rows.start[first])  # the kernel reads both at the first row of a block
        ranks = torch.arange(start)
        pages = rows.pages[int(rows.page_at[first]) :][ranks // rows.page_size]
        tail = rows.tails[int(rows.tail_at[row]) :][: int(rows.tail[row])]
        assert start + len(tail) <= rows.longest
        slots = torch.cat([pages * rows.page_size + ranks % rows.page_size, tail])[-window:].long()
        assert (slots >= 0).all()
        k, v = (x[slots].repeat_interleave(group, 1) for x in (keys, values))
        weights = (torch.einsum("hd,lhd->hl", query[row], k) * scale).softmax(-1)
        out.append(torch.einsum("hl,lhd->hd", weights, v))
    return torch.stack(out)


def _count_rows(rows: DeviceRows, b: int) -> int:
    return int(rows.first_row[b + 1] - rows.first_row[b])


def store(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    is_kept = slots >= 0
    keys[slots[is_kept]], values[slots[is_kept]] = k[is_kept], v[is_kept]


def move(table: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    for tensor in table:
        tensor[targets] = tensor[sources]


def make_torch_kernels() -> GPUKernels:
    def keep(tensors: Any) -> Any:
        return tensors

    return TorchKernels(attend, store, move, keep, 1024)
