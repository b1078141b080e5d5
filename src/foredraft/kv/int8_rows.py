"""Rows of an int8 KV pool as numbers, for code on torch's operators."""

import torch
from torch import Tensor

SCALE_BYTES = 4  # of the float32 scale of one head's keys or values


def dequantize_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of stored keys or values.

    A slot has the codes of all heads, then a float32 scale per head. A code times its head's scale is the number.

    Args:
        rows: slots [.., H, D + 4] int8, as the pool stores them.
        dtype: dtype of the result.

    Returns:
        [.., H, D].
    """
    heads, width = rows.shape[-2], rows.shape[-1] - SCALE_BYTES
    flat = rows.flatten(-2)
    codes = flat[..., : heads * width].reshape(*rows.shape[:-2], heads, width)
    scales: Tensor = flat[..., heads * width :].contiguous().view(torch.float32)  # [.., H]
    return codes.to(torch.float32).mul(scales[..., None]).to(dtype)
