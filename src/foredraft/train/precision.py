"""Precision in which a device multiplies matrices fastest."""

import time

import torch
from torch import Tensor

PRODUCT_SHAPE = (1024, 384, 2048)  # rows, inputs and outputs of the product that is timed on a CPU
TIMED_PRODUCTS = 5  # products per precision; the fastest counts


def has_fast_bfloat16(device: torch.device) -> bool:
    """Check whether the device multiplies bfloat16 matrices faster than float32 matrices.

    The products of a CPU are timed, which takes some 0.2 s of one core: its instructions do not tell. Intel cores
    without AMX run bfloat16 dot products at half of the rate of float32, AMD cores at twice the rate.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return True
    return _time_product(torch.bfloat16) < _time_product(torch.float32)


def choose_training_dtype(device: str) -> torch.dtype:
    """Return the dtype of weights and gradients in which a model is trained fastest: bfloat16 or float32."""
    return torch.bfloat16 if has_fast_bfloat16(torch.device(device)) else torch.float32


def _time_product(dtype: torch.dtype) -> float:
    """Return the time of one matrix product in seconds."""
    rows, inputs, outputs = PRODUCT_SHAPE
    a: Tensor = torch.ones(rows, inputs, dtype=dtype)
    b: Tensor = torch.ones(inputs, outputs, dtype=dtype)
    times = []
    for _ in range(TIMED_PRODUCTS):
        began = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - began)
    return min(times)
