"""Precision in which a device multiplies matrices fastest."""

import time

import torch
from torch import Tensor

Shape = tuple[int, int, int]  # rows, inputs and outputs of a product

# Products that are timed on a CPU. The small one comes first: without instructions for bfloat16 torch may take 100
# times as long as in float32, and half a minute for the large one.
SMALL_SHAPE, LARGE_SHAPE = (128, 384, 256), (1024, 384, 2048)
MAX_SLOWNESS = 4.0  # time of a small product in bfloat16 over that in float32, above which no large one is timed
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
    if _compare_times(SMALL_SHAPE) > MAX_SLOWNESS:
        return False
    return _compare_times(LARGE_SHAPE) < 1.0


def choose_training_dtype(device: str) -> torch.dtype:
    """Return the dtype of weights and gradients in which a model is trained fastest: bfloat16 or float32."""
    return torch.bfloat16 if has_fast_bfloat16(torch.device(device)) else torch.float32


def _compare_times(shape: Shape) -> float:
    """Return the time of a product in bfloat16 over that in float32."""
    return _time_product(torch.bfloat16, shape) / _time_product(torch.float32, shape)


def _time_product(dtype: torch.dtype, shape: Shape) -> float:
    """Return the time of one matrix product in seconds."""
    rows, inputs, outputs = shape
    a: Tensor = torch.ones(rows, inputs, dtype=dtype)
    b: Tensor = torch.ones(inputs, outputs, dtype=dtype)
    times = []
    for _ in range(TIMED_PRODUCTS):
        began = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - began)
    return min(times)
