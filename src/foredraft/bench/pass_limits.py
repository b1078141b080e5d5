"""Limits of a forward pass on a machine: the time to read the weights once, and the time of their arithmetic.

A pass takes at least the longer of the two. Attention and what lies outside matrix products are left out, so a limit is
a lower bound.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.bench.micro import measure_bandwidth
from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import PackedWeight, linear
from foredraft.models.hf import HFModel, get_packed_weights

BANDWIDTH_ROUNDS = 5
# Product that measures the arithmetic: its weight stays in a core's second-level cache.
PEAK_ROWS, PEAK_SIZE, PEAK_ROUNDS = 256, 512, 15


@dataclass(frozen=True)
class PassLimits:
    """Size of a target's weights, and speed of the machine at one moment."""

    weight_bytes: int  # read by a pass
    num_weights: int  # each of them is multiplied with every token of a pass
    gigabytes_per_second: float  # sequential reads from memory, all threads
    gigaflops: float  # 10^9 additions and multiplications per second, all threads, weights in a cache

    @property
    def byte_seconds(self) -> float:
        """Seconds to read the weights once."""
        return self.weight_bytes / (1e9 * self.gigabytes_per_second)

    def compute_arithmetic_seconds(self, rows: int) -> float:
        """Return the seconds of the products of a pass over `rows` tokens."""
        return 2 * self.num_weights * rows / (1e9 * self.gigaflops)

    def describe(self, rows: int) -> str:
        """Format the limit of a pass over `rows` tokens and what sets it, as '27.1 ms (bytes)'."""
        arithmetic = self.compute_arithmetic_seconds(rows)
        name = "bytes" if self.byte_seconds >= arithmetic else "arithmetic"
        return f"{1000 * max(self.byte_seconds, arithmetic):.1f} ms ({name})"


def measure_limits(target: HFModel, dtype: torch.dtype) -> PassLimits:
    """Measure the machine, and count the packed weights of a target.

    Args:
        target: model whose weights are packed.
        dtype: bfloat16 or float32, the type of the products that measure the arithmetic.

    Raises:
        ForedraftError: there are no native kernels, or no packed weights.
    """
    native, weights = load_library(), get_packed_weights(target)
    if native is None or not weights:
        raise ForedraftError("limits are computed from packed weights, which this target does not have")
    sizes = [weight.data.nbytes + (0 if weight.scale is None else weight.scale.nbytes) for weight in weights]
    bandwidth = measure_bandwidth(native, BANDWIDTH_ROUNDS)
    return PassLimits(sum(sizes), sum(w.n * w.k for w in weights), bandwidth.all_threads, measure_peak(dtype))


def measure_peak(dtype: torch.dtype) -> float:
    """Measure 10^9 operations per second of a product in a cache: the faster of this project's kernel and torch's."""
    weight, x = torch.randn(PEAK_SIZE, PEAK_SIZE, dtype=dtype), torch.randn(PEAK_ROWS, PEAK_SIZE, dtype=dtype)
    packed = PackedWeight.pack(weight, None, Arena())
    calls: tuple[Callable[[], Tensor], ...] = lambda: linear(x, packed), lambda: functional.linear(x, weight)
    seconds: list[float] = []
    for call in calls:
        times = []
        for _ in range(PEAK_ROUNDS):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        seconds.append(statistics.median(times))
    return 2 * PEAK_ROWS * PEAK_SIZE**2 / min(seconds) / 1e9


def find_median_limits(limits: Sequence[PassLimits]) -> PassLimits:
    """Return the limits at the median speeds of several moments."""
    return PassLimits(
        limits[0].weight_bytes,
        limits[0].num_weights,
        statistics.median(limit.gigabytes_per_second for limit in limits),
        statistics.median(limit.gigaflops for limit in limits),
    )
