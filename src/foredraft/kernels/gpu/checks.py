"""Limits of the GPU kernels, without triton: what they take, and the reason if they do not."""

import torch
from torch import Tensor

from foredraft.errors import ForedraftError

MAX_HEAD_DIM = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def explain_unsupported_tensors(query: Tensor, keys: Tensor, values: Tensor) -> str | None:
    """Return why the attention kernel does not take these types and sizes; None if it does.

    Args:
        query: [T, Hq, D].
        keys: [S, Hkv, D].
        values: [S, Hkv, Dv].
    """
    width = max(keys.shape[-1], values.shape[-1])
    if width > MAX_HEAD_DIM:
        return f"a head size of {width} is above {MAX_HEAD_DIM}"
    if query.dtype not in DTYPES:
        return f"queries are {query.dtype}"
    if keys.dtype != query.dtype or values.dtype != query.dtype:
        return f"queries are {query.dtype}, keys {keys.dtype} and values {values.dtype}"
    return None


def check_attention(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> None:
    """Check the arguments of the attention kernel.

    Args:
        query: [T, Hq, D].
        keys: [S, Hkv, D].
        values: [S, Hkv, Dv].
        sinks: [Hq]; None = no sinks.

    Raises:
        ForedraftError: the message has the tensor and what it must be.
    """
    reason = explain_unsupported_tensors(query, keys, values)
    if reason is not None:
        raise ForedraftError(f"the GPU attention kernel cannot run: {reason}")
    heads, kv_heads = query.shape[1], keys.shape[1]
    if query.shape[2] != keys.shape[2] or keys.shape[:2] != values.shape[:2] or heads % kv_heads:
        raise ForedraftError(
            "queries [T, Hq, D] need keys [S, Hkv, D] and values [S, Hkv, Dv] with Hkv a divisor of Hq; got "
            f"{list(query.shape)}, {list(keys.shape)} and {list(values.shape)}"
        )
    check_contiguous(keys=keys, values=values)
    if sinks is not None and sinks.shape != (heads,):
        raise ForedraftError(f"sinks must have one number for each of {heads} heads, got {list(sinks.shape)}")


def check_contiguous(**tensors: Tensor) -> None:
    """Raise ForedraftError if a tensor is not contiguous; the name of the argument is in the message."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ForedraftError(f"{name} must be contiguous, got strides {tensor.stride()}")
