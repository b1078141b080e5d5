"""Products with packed weights: the native kernel and its slow reference.

Weights are in panels of 32 outputs with pairs of inputs adjacent, so a pass reads them as one stream. Every output is
one chain of additions over the inputs, so a row's result does not depend on the other rows of the product.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.cpu.records import LinearRecord, WeightRecord

PANEL = 32  # outputs of a panel
DTYPE_KINDS = {torch.bfloat16: 0, torch.float32: 1}  # as in foredraft.h; int8 and int4 follow


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [n, k] in panels. `data` is [n/32, k/2, 32, 2] in bfloat16 and [n/32, k, 32] in float32."""

    data: Tensor
    n: int
    k: int
    kind: int
    bias: Tensor | None = None  # [n] float32
    scale: Tensor | None = None  # float32, of quantised kinds
    group: int = 0  # inputs that share a scale; 0 = not quantised

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, arena: Arena) -> "PackedWeight":
        """Pack [n, k] in bfloat16 or float32. Raises ForedraftError for other types."""
        if weight.dtype not in DTYPE_KINDS:
            raise ForedraftError(f"native kernels take bfloat16 and float32 weights, not {weight.dtype}")
        n, k = weight.shape
        data = arena.allocate(*_compute_packed_shape(n, k, weight.dtype), dtype=weight.dtype)
        _fill_panels(data, weight.detach())
        own_bias = None if bias is None else bias.detach().float().clone()
        return cls(data, n, k, DTYPE_KINDS[weight.dtype], own_bias)

    def unpack(self) -> Tensor:
        """Return the original matrix [n, k]."""
        panels, steps = self.data.shape[:2]
        grid = self.data.view(panels, steps, PANEL, -1)  # the last dimension is 2 in bfloat16, 1 in float32
        return grid.transpose(1, 2).reshape(panels * PANEL, -1)[: self.n, : self.k]

    @cached_property
    def record(self) -> WeightRecord:
        """Record for the native code; valid as long as this object lives."""
        address = self.data.data_ptr()
        scale = None if self.scale is None else self.scale.data_ptr()
        bias = None if self.bias is None else self.bias.data_ptr()
        return WeightRecord(address, scale, bias, self.n, self.k, self.kind, self.group)


def _compute_packed_shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, ...]:
    panels = -(-n // PANEL)
    return (panels, -(-k // 2), PANEL, 2) if dtype == torch.bfloat16 else (panels, k, PANEL)


def _fill_panels(data: Tensor, weight: Tensor) -> None:
    n, k = weight.shape
    panels, steps = data.shape[:2]
    width = data.shape[3] if data.dim() == 4 else 1
    grid = data.view(panels, steps, PANEL, width)
    whole = n // PANEL
    if k == steps * width:
        grid[:whole] = weight[: whole * PANEL].view(whole, PANEL, steps, width).transpose(1, 2)
    else:
        whole = 0
    if whole < panels:
        rest = weight.new_zeros((panels - whole) * PANEL, steps * width)
        rest[: n - whole * PANEL, :k] = weight[whole * PANEL :]
        grid[whole:] = rest.view(panels - whole, PANEL, steps, width).transpose(1, 2)


def linear_reference(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply [T, k] -> [T, n] float32 in plain torch. Inputs are rounded as in the kernel; sums are float64."""
    dense = weight.unpack()
    out = x.to(dense.dtype).double() @ dense.double().T
    return (out if weight.bias is None else out + weight.bias.double()).float()


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply [T, k] -> [T, n] float32 by the native kernel. Raises ForedraftError if it is not installed."""
    native = load_library()
    if native is None:
        raise ForedraftError("the native kernels are not installed; run: python -m foredraft.kernels.cpu.build")
    rows = x.float().contiguous()
    out = torch.empty(len(rows), weight.n, dtype=torch.float32)
    native.sync_threads()
    scratch = torch.empty(native.handle.fd_linear_scratch(weight.record, len(rows)), dtype=torch.uint8)
    product = LinearRecord(
        ctypes.pointer(weight.record), rows.data_ptr(), out.data_ptr(), scratch.data_ptr(), len(rows)
    )
    native.handle.fd_linear(product)
    return out
