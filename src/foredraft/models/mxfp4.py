"""Experts in MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS is published, decoded in plain torch."""

import torch
from torch import Tensor

from foredraft.errors import ForedraftError

BLOCK_INPUTS = 32  # adjacent inputs that share a scale
SCALE_BIAS = 127  # E8M0: a scale is 2 to the stored byte minus this
INVALID_SCALE = 255  # not a number in E8M0
# E2M1 by its 4 bits: sign, two bits of exponent, one of mantissa
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode the matrices of experts, one at a time. Every value is exact in bfloat16 and in wider types.

    Args:
        blocks: uint8 [E, n, G, 16]: two numbers of E2M1 per byte, the first one in the low bits.
        scales: uint8 [E, n, G]: E8M0.
        dtype: floating type of the result.

    Returns:
        [E, k, n] with k = 32 G, transposed as transformers stores the experts of GPT-OSS.

    Raises:
        ForedraftError: blocks and scales do not belong together, or a scale is not a number.
    """
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or blocks.dim() != 4:
        raise ForedraftError(f"blocks are {blocks.dtype} of {blocks.dim()} dimensions, scales are {scales.dtype}")
    if blocks.shape != (*scales.shape, BLOCK_INPUTS // 2):
        raise ForedraftError(f"blocks have shape {list(blocks.shape)} and scales {list(scales.shape)}")
    if (scales == INVALID_SCALE).any():
        raise ForedraftError("a scale is not a number")
    experts, rows, groups = scales.shape
    decoded = torch.empty(experts, groups * BLOCK_INPUTS, rows, dtype=dtype)
    values = torch.tensor(E2M1_VALUES)
    for expert in range(experts):
        packed = blocks[expert]
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(2)  # [n, G, 32]
        exponents = scales[expert, ..., None].int() - SCALE_BIAS
        decoded[expert] = torch.ldexp(values[codes.int()], exponents).flatten(1).T
    return decoded
