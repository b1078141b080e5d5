"""Root-mean-square norm of rows, with the addition of a residual before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.errors import ForedraftError

NUMBERS_PER_WARP = 512
MAX_WARPS = 16


@triton.jit(do_not_specialize=["x_row", "residual_row"])
def normalize_row(
    x, residual, weight, out, total, x_row, residual_row, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_OFFSET: tl.constexpr,
    IS_LATE: tl.constexpr,
):  # fmt: skip
    """Normalise one row. Grid (rows,): the order of the sum depends on the width alone."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    is_inside = i < WIDTH
    numbers = tl.load(x + row * x_row + i, mask=is_inside, other=0.0)
    kind = out.dtype.element_ty
    if HAS_RESIDUAL:
        numbers = (numbers.to(tl.float32) + tl.load(residual + row * residual_row + i, mask=is_inside, other=0.0)).to(
            kind
        )
        tl.store(total + row * WIDTH + i, numbers, mask=is_inside)
    wide = numbers.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    factors = tl.load(weight + i, mask=is_inside, other=0.0).to(tl.float32)
    if IS_OFFSET:  # Gemma multiplies before it rounds
        result = wide * scale * (1.0 + factors)
    elif IS_LATE:
        result = wide * scale * factors
    else:
        result = (wide * scale).to(kind).to(tl.float32) * factors
    tl.store(out + row * WIDTH + i, result.to(kind), mask=is_inside)


def count_warps(pad: int) -> int:
    """Return the warps of a program whose row is padded to `pad` numbers."""
    return min(max(pad // NUMBERS_PER_WARP, 1), MAX_WARPS)


def normalize(
    x: Tensor,  # [T, H]
    weight: Tensor,  # [H]
    eps: float,
    residual: Tensor | None = None,  # [T, H]
    is_offset: bool = False,
    is_late: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the norm of every row of x + residual.

    Args:
        x: rows.
        weight: factors.
        eps: added to the mean square.
        residual: added before the norm. Default None = zero.
        is_offset: whether the factors are 1 + weight, multiplied before rounding, as in Gemma. Default False.
        is_late: whether factors are multiplied before rounding, as in OLMo 2. Default False.

    Returns:
        Normalised rows [T, H], and the sum [T, H] that was normalised, both in the type of x.

    Raises:
        ForedraftError: the shapes differ.
    """
    (num_rows, width) = x.shape
    if weight.shape != (width,) or (residual is not None and residual.shape != x.shape):
        other = "" if residual is None else f" and residual {list(residual.shape)}"
        raise ForedraftError(f"rows {list(x.shape)} do not fit weight {list(weight.shape)}{other}")
    x = x if x.stride(1) == 1 else x.contiguous()
    added = x if residual is None else residual if residual.stride(1) == 1 else residual.contiguous()
    out = x.new_empty(num_rows, width)
    total = x if residual is None else x.new_empty(num_rows, width)
    pad = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):  # triton launches on the current device
        normalize_row[(num_rows,)](
            x, added, weight.contiguous(), out, total, x.stride(0), added.stride(0), eps,
            WIDTH=width, PAD=pad, HAS_RESIDUAL=residual is not None, IS_OFFSET=is_offset, IS_LATE=is_late,
            num_warps=count_warps(pad), enable_fp_fusion=False,
        )  # fmt: skip
    return out, total
