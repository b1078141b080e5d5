"""Limits of a forward pass on a machine: the time to read the weights once, and the time of their arithmetic.

A pass takes at least the longer of the two. Keys and values of the context count likewise: they are read once per pass,
and multiplied with every row. Layers with a window, and what lies outside products, are left out, so a limit is a lower
bound.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from foredraft.bench.micro import measure_bandwidth
from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import PackedWeight, linear
from foredraft.models.hf import HFModel, get_packed_weights
from foredraft.models.native.decoder import NativeDecoder

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
    num_head_weights: int = 0  # of the weights, those that only tokens with logits are multiplied with
    context_bytes: int = 0  # keys and values of one token of the context
    context_products: int = 0  # multiplications of a row with one token of the context

    @property
    def byte_seconds(self) -> float:
        """Seconds to read the weights once."""
        return self.compute_byte_seconds(context=0)

    def compute_byte_seconds(self, context: int) -> float:
        """Return the seconds to read the weights, and the keys and values of `context` tokens, once."""
        return (self.weight_bytes + context * self.context_bytes) / (1e9 * self.gigabytes_per_second)

    def compute_arithmetic_seconds(self, rows: int, context: int = 0, logit_rows: int | None = None) -> float:
        """Return the seconds of the products of a pass.

        Args:
            rows: tokens of the pass.
            context: tokens before the pass.
            logit_rows: tokens whose logits are computed; None = all.
        """
        products = (self.num_weights + context * self.context_products) * rows
        if logit_rows is not None:
            products -= self.num_head_weights * (rows - logit_rows)
        return 2 * products / (1e9 * self.gigaflops)

    def compute_seconds(self, rows: int, context: int = 0, logit_rows: int | None = None) -> float:
        """Return the least seconds of a pass; arguments as in `compute_arithmetic_seconds`."""
        return max(self.compute_byte_seconds(context), self.compute_arithmetic_seconds(rows, context, logit_rows))

    def compute_streams_speed(self, streams: int, prompt_tokens: int, max_tokens: int) -> float:
        """Return the most tokens per second of plain decoding of sequences that begin together, prompts included.

        Args:
            streams: number of sequences.
            prompt_tokens: tokens of each prompt; all prompts are one pass.
            max_tokens: output tokens of each sequence.
        """
        prompts = self.compute_seconds(streams * prompt_tokens, logit_rows=streams)
        return streams * max_tokens / (prompts + (max_tokens - 1) * self.compute_seconds(streams))

    def describe(self, rows: int, context: int = 0) -> str:
        """Format the limit of a pass over `rows` tokens after `context` ones and what sets it, as '27.1 ms (bytes)'."""
        seconds = self.compute_seconds(rows, context)
        name = "bytes" if seconds <= self.compute_byte_seconds(context) else "arithmetic"
        return f"{1000 * seconds:.1f} ms ({name})"


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
    limits = PassLimits(sum(sizes), sum(w.n * w.k for w in weights), bandwidth.all_threads, measure_peak(dtype))
    if target.fused is None:
        return limits
    return replace(limits, **_count_context(target.fused))


def _count_context(decoder: NativeDecoder) -> dict[str, int]:
    """Count the weights of the head, and what one token of the context adds in layers that attend to all of it."""
    record, head = decoder.record, decoder.head
    layers = [record.layer[i] for i in range(record.layers)]
    attending = [layer for layer in layers if not layer.mixer]
    num_whole = sum(not layer.sliding_window for layer in attending)
    return {
        "num_head_weights": head.n * head.k,
        "context_bytes": decoder.kv_bytes_per_token * num_whole // max(len(attending), 1),
        "context_products": 2 * record.heads * record.head_dim * num_whole,  # scores, and the sum of values
    }


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
    return replace(
        limits[0],
        gigabytes_per_second=statistics.median(limit.gigabytes_per_second for limit in limits),
        gigaflops=statistics.median(limit.gigaflops for limit in limits),
    )
