"""Limits of a forward pass on a machine: the time to read the weights once, and the time of their arithmetic.

A pass takes at least the longer of the two. Keys and values of the context count likewise: they are read once per pass,
and multiplied with every row. Layers with a window, and what lies outside products, are left out, so a limit is a lower
bound. Of a mixture of experts the chosen experts of one row count, of an encoder-decoder model the decoder.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from foredraft.bench.machine_speed import measure_bandwidth, measure_peak
from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import PackedWeight
from foredraft.kernels.quantize import QUANTIZED_KINDS
from foredraft.models.encdec.model import EncoderDecoder
from foredraft.models.hf import HFModel, get_packed_weights
from foredraft.models.native.decoder import NativeDecoder
from foredraft.outputs import Stats

BANDWIDTH_ROUNDS = 5


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

    def compute_arithmetic_seconds(self, rows: float, context: int = 0, logit_rows: int | None = None) -> float:
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

    def compute_seconds(self, rows: float, context: int = 0, logit_rows: int | None = None) -> float:
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

    def compute_draft_speed(self, stats: Stats, streams: int = 1) -> float:
        """Return the most tokens per second if only passes over output and drafts after short contexts took time.

        Args:
            stats: tokens, drafts and passes of finished requests.
            streams: requests that share every pass.
        """
        passes = max(stats.target_passes, 1)
        seconds = self.compute_seconds(streams * (1 + stats.num_drafted / passes))
        return streams * stats.num_tokens / passes / seconds

    def describe(self, rows: int, context: int = 0, logit_rows: int | None = None) -> str:
        """Format the limit of a pass and what sets it, as '27.1 ms (bytes)'; arguments as in `compute_seconds`."""
        seconds = self.compute_seconds(rows, context, logit_rows)
        name = "bytes" if seconds <= self.compute_byte_seconds(context) else "arithmetic"
        return f"{1000 * seconds:.1f} ms ({name})"

    def describe_machine(self) -> str:
        """Format the speeds and the size of the weights."""
        return (
            f"{self.gigabytes_per_second:.1f} GB/s from memory, {self.gigaflops:.0f} GFLOP/s of products in a cache, "
            f"{self.weight_bytes / 1e6:.0f} MB of weights per pass"
        )


def measure_limits(target: HFModel, dtype: torch.dtype) -> PassLimits:
    """Measure the machine, and count the packed weights of a target.

    Args:
        target: model whose weights are packed.
        dtype: bfloat16 or float32, the type of the products that measure the arithmetic.

    Raises:
        ForedraftError: there are no native kernels, or no packed weights.
    """
    native, weights = load_library(), _list_read_weights(target)
    if native is None or not weights:
        raise ForedraftError("limits are computed from packed weights, which this target does not have")
    limits = PassLimits(
        weight_bytes=round(sum(share * _count_bytes(weight) for weight, share in weights)),
        num_weights=round(sum(share * weight.n * weight.k for weight, share in weights)),
        gigabytes_per_second=measure_bandwidth(native, BANDWIDTH_ROUNDS).all_threads,
        gigaflops=measure_peak(dtype, _find_quantization(weights[0][0])),
    )
    if target.fused is None:
        return limits
    return replace(limits, **_count_context(target.fused))


def _list_read_weights(target: HFModel) -> list[tuple[PackedWeight, float]]:
    """List the weights of a pass over one row, each with the share of it that the row reads."""
    if isinstance(target, EncoderDecoder):
        return [] if target.native is None else [(weight, 1.0) for weight in target.native.weights]
    shares = {} if target.fused is None else _find_expert_shares(target.fused)
    return [(weight, shares.get(weight.data.data_ptr(), 1.0)) for weight in get_packed_weights(target)]


def _find_expert_shares(decoder: NativeDecoder) -> dict[int, float]:
    """Return the share of the chosen experts among all, by the address of each expert's weight."""
    shares: dict[int, float] = {}
    for i in range(decoder.record.layers):
        if decoder.record.layer[i].experts:
            experts = decoder.record.layer[i].experts.contents
            for matrices in (experts.gate_up, experts.down):
                shares |= {matrices[j].data: experts.per_token / experts.count for j in range(experts.count)}
    return shares


def _count_bytes(weight: PackedWeight) -> int:
    return weight.data.nbytes + (0 if weight.scale is None else weight.scale.nbytes)


def _find_quantization(weight: PackedWeight) -> str | None:
    return next((name for name, kind in QUANTIZED_KINDS.items() if kind == weight.kind), None)


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


def find_median_limits(limits: Sequence[PassLimits]) -> PassLimits:
    """Return the limits at the median speeds of several moments."""
    return replace(
        limits[0],
        gigabytes_per_second=statistics.median(limit.gigabytes_per_second for limit in limits),
        gigaflops=statistics.median(limit.gigaflops for limit in limits),
    )


def format_limit(limit: float | None, measured: float) -> str:
    """Format a limit and the share of it that was reached, as '891 (41 %)'; '-' without a limit."""
    return "-" if limit is None else f"{limit:.0f} ({100 * measured / limit:.0f} %)"


@dataclass
class LimitsMeter:
    """Limits of a target, measured at several moments of a benchmark, because the speed of a machine changes.

    A target without packed weights, such as one on a GPU, has none.
    """

    target: HFModel
    _found: list[PassLimits] = field(default_factory=list)

    def measure(self) -> None:
        """Measure at this moment."""
        if load_library() is not None and _list_read_weights(self.target):
            self._found.append(measure_limits(self.target, self.target.model.dtype))

    @property
    def limits(self) -> PassLimits | None:
        """Limits at the median speeds; None without packed weights."""
        return find_median_limits(self._found) if self._found else None
