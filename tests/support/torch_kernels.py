"""Slow kernels of the GPU's interface on torch's operators, row by row: for tests of what surrounds the kernels."""

from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.gpu.loading import GPUKernels
from foredraft.kernels.gpu.rows import DeviceRows


def list_slots(rows: DeviceRows, row: int) -> Tensor:
    """Return the slots that a row sees, in order of rank."""
    start, size = int(rows.start[row]), rows.page_size
    ranks = torch.arange(start)
    table = rows.pages[int(rows.page_at[row]) :]
    at = int(rows.tail_at[row])
    return torch.cat([table[ranks // size] * size + ranks % size, rows.tails[at : at + int(rows.tail[row])]])


def attend(
    query: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows, scale: float, window: int = 0, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention [T, Hq, D], each row by itself."""
    assert int(rows.first_row[0]) == 0
    assert int(rows.first_row[rows.num_requests]) == len(query), "rows without a request are not computed"
    assert len(rows.first_row) == rows.num_requests + 1
    assert not softcap
    assert sinks is None
    group = query.shape[1] // keys.shape[1]
    out = torch.full((len(query), query.shape[1], values.shape[2]), torch.nan, dtype=query.dtype)
    for request in range(rows.num_requests):
        for row in range(int(rows.first_row[request]), int(rows.first_row[request + 1])):
            slots = list_slots(rows, row)[-window:]
            assert len(slots) <= rows.longest
            k, v = (x[slots].repeat_interleave(group, 1) for x in (keys, values))
            weights = (torch.einsum("hd,lhd->hl", query[row], k) * scale).softmax(-1)
            out[row] = torch.einsum("hl,lhd->hd", weights, v)
    return out


def store(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Copy keys and values to their slots; a row with a negative slot is skipped."""
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            keys[slot], values[slot] = k[row], v[row]


def move(table: list[Tensor], sources: Tensor, targets: Tensor) -> None:
    """Copy slots to other slots in every tensor."""
    for tensor in table:
        tensor[targets] = tensor[sources].clone()


class TorchKernels(GPUKernels):
    """Kernels that take every type, float64 too."""

    def can_attend(self, query: Tensor, keys: Tensor, values: Tensor) -> bool:
        return True


def make_torch_kernels() -> GPUKernels:
    """Make the kernels of a pool on the CPU."""
    make_table: Any = list
    return TorchKernels(attend, store, move, make_table, 1024)
