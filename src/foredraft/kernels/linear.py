"""Products with packed weights: the native kernel, its slow reference, and a torch operator that torch.compile knows.

Weights lie in panels of 32 outputs, pairs of inputs side by side, so that a pass reads them as one stream. Every output
is one chain of additions over the inputs: a row's result does not depend on which rows are computed with it.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import Product, Weight, library

PANEL = 32
KINDS = {torch.bfloat16: 0, torch.float32: 1}  # as in foredraft.h; int8 and int4 follow


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [n, k] in panels. `data` is [n/32, k/2, 32, 2] in bfloat16 and [n/32, k, 32] in float32."""

    data: Tensor
    n: int
    k: int
    kind: int
    bias: Tensor | None = None  # [n] float32
    scale: Tensor | None = None  # float32, of quantised kinds
    group: int = 0

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, arena: Arena) -> "PackedWeight":
        """From [n, k] in bfloat16 or float32. Raises ForedraftError for other types."""
        if weight.dtype not in KINDS:
            raise ForedraftError(f"native kernels take bfloat16 and float32 weights, not {weight.dtype}")
        n, k = weight.shape
        data = arena.empty(*_packed_shape(n, k, weight.dtype), dtype=weight.dtype)
        _fill(data, weight.detach())
        own_bias = None if bias is None else bias.detach().float().clone()
        return cls(data, n, k, KINDS[weight.dtype], own_bias)

    def unpacked(self) -> Tensor:
        """[n, k] as it was."""
        panels, steps = self.data.shape[:2]
        grid = self.data.view(panels, steps, PANEL, -1)  # pairs, or one by one
        return grid.transpose(1, 2).reshape(panels * PANEL, -1)[: self.n, : self.k]

    @cached_property
    def record(self) -> Weight:
        """What the native side reads; valid as long as this object lives."""
        address = self.data.data_ptr()
        scale = None if self.scale is None else self.scale.data_ptr()
        bias = None if self.bias is None else self.bias.data_ptr()
        return Weight(address, scale, bias, self.n, self.k, self.kind, self.group)


def _packed_shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, ...]:
    panels = -(-n // PANEL)
    return (panels, -(-k // 2), PANEL, 2) if dtype == torch.bfloat16 else (panels, k, PANEL)


def _fill(data: Tensor, weight: Tensor) -> None:
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
    """[T, k] -> [T, n] float32 in plain torch, exact to float32 rounding: inputs rounded as the kernel rounds them."""
    dense = weight.unpacked()
    out = x.to(dense.dtype).double() @ dense.double().T
    return (out if weight.bias is None else out + weight.bias.double()).float()


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """[T, k] -> [T, n] float32 by the native kernel. Raises ForedraftError where it is not installed."""
    native = library()
    if native is None:
        raise ForedraftError("the native kernels are not installed; run: python -m foredraft.kernels.cpu.build")
    rows = x.float().contiguous()
    out = torch.empty(len(rows), weight.n)
    native.follow_threads()
    scratch = torch.empty(native.handle.fd_linear_scratch(weight.record, len(rows)), dtype=torch.uint8)
    product = Product(ctypes.pointer(weight.record), rows.data_ptr(), out.data_ptr(), scratch.data_ptr(), len(rows))
    native.handle.fd_linear(product)
    return out
