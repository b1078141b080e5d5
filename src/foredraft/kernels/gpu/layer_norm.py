"""Layer norm of rows: mean zero and variance one, then factors and a bias."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.norm import count_warps


@triton.jit
def normalize_layer_row(
    x, weight, bias, out, eps, WIDTH: tl.constexpr, PAD: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Normalise one row. Grid (rows,): the order of the sums depends on the width alone."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    is_inside = i < WIDTH
    wide = tl.load(x + row * WIDTH + i, mask=is_inside, other=0.0).to(tl.float32)
    centred = tl.where(is_inside, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    result = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    if HAS_WEIGHT:
        result = result * tl.load(weight + i, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result = result + tl.load(bias + i, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, result.to(out.dtype.element_ty), mask=is_inside)


def normalize_layer(
    x: Tensor,  # [T, H]
    weight: Tensor | None,  # [H]
    bias: Tensor | None,  # [H]
    eps: float,
) -> Tensor:
    """Compute the layer norm of every row, with one rounding.

    Args:
        x: rows.
        weight: factors; None = one.
        bias: added at the end; None = zero.
        eps: added to the variance.

    Returns:
        Normalised rows [T, H] in the type of x.

    Raises:
        ForedraftError: the shapes differ.
    """
    (num_rows, width), x = x.shape, x.contiguous()
    for name, factors in (("weight", weight), ("bias", bias)):
        if factors is not None and factors.shape != (width,):
            raise ForedraftError(f"rows {list(x.shape)} do not fit {name} {list(factors.shape)}")
    out = x.new_empty(num_rows, width)
    pad = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):  # triton launches on the current device
        normalize_layer_row[(num_rows,)](
            x, out if weight is None else weight.contiguous(), out if bias is None else bias.contiguous(), out, eps,
            WIDTH=width, PAD=pad, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            num_warps=count_warps(pad), enable_fp_fusion=False,
        )  # fmt: skip
    return out
