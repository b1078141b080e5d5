"""Weights of tokens: what a softmax divides by its sum, relative to the likeliest token.

On the CPU, float32 weights are made of single multiplications and additions, so that the native sampler
(`kernels/cpu/weights.h`) and every processor have the same bits; a library's exponential function differs in the last
one. Their sums count in integer units, so the order of a sum is free. Other precisions and devices use torch's `exp`.
"""

import numpy as np
import torch
from torch import Tensor

UNIT = 2.0**-42  # float32 weights are summed in units of this size; a vocabulary of 2^20 weights of 1 is within int64
MIN_EXPONENT = -100.0  # a token below 2^-100 of the likeliest has weight zero, so that no probability is subnormal
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

_STEPS_BIAS = 786432.0  # 1.5 * 2^19: a float32 of this size has a precision of 1/16
_STEPS_BITS = 0x49400000  # its bits
_POWERS = (float.fromhex("0x1.62e43p-1"), float.fromhex("0x1.ebff92p-3"), float.fromhex("0x1.c6b348p-5"))
SIXTEENTHS = np.array(  # 2^(j / 16), rounded to float32
    [
        float.fromhex(f"0x{digits}p0")
        for digits in (
            "1.000000 1.0b5586 1.172b84 1.2387a6 1.306fe0 1.3dea64 1.4bfdae 1.5ab07e "
            "1.6a09e6 1.7a1148 1.8ace54 1.9c4918 1.ae89fa 1.c199be 1.d5818e 1.ea4afa"
        ).split()
    ],
    dtype=np.float32,
)


def compute_scale(temperature: float, dtype: torch.dtype) -> float:
    """Return log2(e) / temperature within the range of normal numbers of the dtype."""
    limits = torch.finfo(dtype)
    return min(max(LOG2_E / max(temperature, torch.finfo(torch.float64).tiny), limits.tiny), limits.max)


def compute_exponents(x: Tensor, scale: Tensor | float) -> Tensor:
    """Return the base-2 logarithms of the weights [R, V], at most 0, from logits [R, V] with finite maxima."""
    return (x - x.amax(-1, keepdim=True)) * scale


def compute_weights(exponents: Tensor) -> Tensor:
    """Return 2^exponent, [R, V]; 0 below `MIN_EXPONENT` for float32."""
    if exponents.dtype != torch.float32:
        return (exponents * LN_2).exp()  # the bits of torch's exp2 depend on the shape
    kept = (exponents >= MIN_EXPONENT).float()
    t = exponents.clamp_min(MIN_EXPONENT - 1)
    if t.device.type != "cpu":
        return (t * LN_2).exp_().mul_(kept)
    shifted = t + _STEPS_BIAS
    r = t.sub_(shifted - _STEPS_BIAS)  # exact
    c1, c2, c3 = _POWERS
    q = (r * c3).add_(c2).mul_(r).add_(c1).mul_(r)
    k = shifted.view(torch.int32).sub_(_STEPS_BITS)  # t = k / 16 + r
    e = torch.from_numpy(SIXTEENTHS.take((k & 15).numpy(), mode="clip"))  # a third of the time of torch's indexing
    y = q.mul_(e).add_(e).view(torch.int32).add_((k >> 4).bitwise_left_shift_(23))
    return y.view(torch.float32).mul_(kept)


def count_units(mass: Tensor) -> Tensor:
    """Return the terms of an exact sum: float64 numbers in units of `UNIT` as int64, rounded to the nearest."""
    return (mass / UNIT).round().to(torch.int64)


def to_summands(w: Tensor) -> Tensor:
    """Return weights as they are summed: int64 units for float32, else the weights."""
    return count_units(w.double()) if w.dtype == torch.float32 else w


def normalise(w: Tensor) -> Tensor:
    """Scale weights to probabilities, [R, V]."""
    total = to_summands(w).sum(-1, keepdim=True)
    return w / (total.double() * UNIT).float() if w.dtype == torch.float32 else w / total
