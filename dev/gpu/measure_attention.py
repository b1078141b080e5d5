"""Part (c): time of attention by context and rows, as the share of it that reading the KV once would take.

Usage: dev/gpu/run.sh [--dry] [FOLDER], which runs all parts.

A pass attends in many layers, whose KV together is larger than the L2 cache. Each layer here has its own KV, and all of
them run in one CUDA graph, so that launches from Python do not count; `eager` is the time with them. `torch` is the
time of the way out: a copy of the KV of the request, then scaled_dot_product_attention with a mask.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from report import Report
from torch import Tensor

from foredraft.kernels.gpu.attention import AttentionPlan, attend
from foredraft.kv.pool import KVPool
from foredraft.models.attention import paged_attention
from foredraft.models.forward_batch import ForwardBatch, Span
from tests.support.gpu_cases import DEVICE, scatter_pages

PAGE_SIZE = 16
L2_BYTES = 300 << 20  # KV of all layers together, at least: several times the largest L2 cache
REPEATS, WARMUP = 20, 3
# (context, rows, lines of a program). More lines than 16 read the keys for more rows at once: prompts, wide trees.
CASES = [(context, rows, 16) for context in (1 << 10, 1 << 13, 1 << 15) for rows in (1, 4, 8, 16, 64)]
CASES += [
    (1 << 13, rows, lines) for rows in (64, 512, 2048) for lines in (16, 32, 64, 128) if (rows, lines) != (64, 16)
]
DRY_CASES = [(300, 1, 16), (300, 4, 16), (40, 20, 64)]


@dataclass(frozen=True)
class Layer:
    """Sizes of an attention layer: those of Llama-3-8B."""

    heads: int = 32
    kv_heads: int = 8
    width: int = 128

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.kv_heads * self.width * torch.bfloat16.itemsize


def measure_seconds(run: Callable[[], object], repeats: int) -> float:
    """Measure the median time of a call."""
    times = []
    for i in range(repeats + WARMUP):
        if DEVICE == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()  # type: ignore[no-untyped-call]
            run()
            end.record()  # type: ignore[no-untyped-call]
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        if i < WARMUP:
            times.clear()
    return sorted(times)[len(times) // 2]


def measure_bandwidth(num_bytes: int) -> float:
    """Measure the bytes per second of a read of a large tensor."""
    data = torch.zeros(num_bytes // 4, device=DEVICE)
    return num_bytes / measure_seconds(lambda: data.sum(), REPEATS)


def capture(run: Callable[[], object]) -> Callable[[], object]:
    """Capture calls in a CUDA graph, after a call that compiles them."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@dataclass(frozen=True)
class Setup:
    """KV of several layers, and one window of rows over it."""

    batch: ForwardBatch
    query: Tensor  # [T, Hq, D]
    layers: Sequence[tuple[Tensor, Tensor]]  # keys and values [S, Hkv, D]
    scale: float

    @classmethod
    def make(cls, layer: Layer, context: int, rows: int, num_layers: int) -> "Setup":
        num_pages = -(-(context + rows) // PAGE_SIZE) + 2
        (pages,) = scatter_pages([context + rows], 0, PAGE_SIZE, num_pages)
        span = Span(pages, context, [7] * rows, range(rows))
        batch = ForwardBatch.from_spans([span], PAGE_SIZE, DEVICE)
        shape = (num_pages * PAGE_SIZE, layer.kv_heads, layer.width)
        layers = [
            tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)) for _ in range(num_layers)
        ]
        query = torch.randn(rows, layer.heads, layer.width, device=DEVICE, dtype=torch.bfloat16)
        return cls(batch, query, layers, layer.width**-0.5)  # type: ignore[arg-type]

    def run_kernel(self, plan: AttentionPlan | None = None) -> Tensor:
        for keys, values in self.layers:
            out = attend(self.query, keys, values, self.batch.device_rows, self.scale, plan=plan)
        return out

    def run_torch(self) -> Tensor:
        """Run the way out, without its write of new keys: the slots of the rows get their own numbers again."""
        slots, num_rows = self.batch.write_slots, len(self.query)
        for i, (keys, values) in enumerate(self.layers):
            pool = KVPool(layers={i: (keys, values)})
            k, v = (x[slots].view(1, num_rows, *x.shape[1:]).transpose(1, 2) for x in (keys, values))
            out = paged_attention(
                SimpleNamespace(layer_idx=i),  # type: ignore[arg-type]
                self.query.transpose(0, 1)[None], k, v, None, scaling=self.scale, forward_batch=self.batch, pool=pool,
            )[0]  # fmt: skip
        return out[0]


def measure(
    layer: Layer, context: int, rows: int, lines: int, bandwidth: float, is_dry: bool
) -> tuple[bool, dict[str, Any]]:
    per_layer = (context + rows) * layer.bytes_per_token
    num_layers = 1 if is_dry else max(1, min(32, -(-L2_BYTES // per_layer)))
    setup = Setup.make(layer, context, rows, num_layers)
    plan = AttentionPlan.make(layer.heads // layer.kv_heads, layer.width, torch.bfloat16.itemsize, lines)
    run_kernel = partial(setup.run_kernel, plan)
    error = (run_kernel().float() - setup.run_torch().float()).abs().max().item()
    bound = 4 * torch.finfo(torch.bfloat16).eps  # outputs are means of many values and lie below 4
    figures: dict[str, Any] = {"layers": num_layers, "error": f"{error:.1e}"}
    if not is_dry:
        repeats = REPEATS
        graph = measure_seconds(capture(run_kernel), repeats) / num_layers
        eager = measure_seconds(run_kernel, repeats) / num_layers
        torch_seconds = measure_seconds(setup.run_torch, repeats) / num_layers
        ideal = per_layer / bandwidth
        figures |= {
            "us": round(graph * 1e6, 1), "bytes_us": round(ideal * 1e6, 1), "share": round(ideal / graph, 3),
            "eager_us": round(eager * 1e6, 1), "torch_us": round(torch_seconds * 1e6, 1),
        }  # fmt: skip
    return error <= bound, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small cases in triton's interpreter, and no times")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    options = parser.parse_args()
    report, layer = Report(options.out), Layer(4, 1, 64) if options.dry else Layer()
    cases = DRY_CASES if options.dry else CASES
    torch.manual_seed(0)
    bandwidth = 0.0
    if not options.dry:
        bandwidth = measure_bandwidth(4 << 30)
        report.add("read bandwidth", None, gb_per_s=round(bandwidth / 1e9))
    with torch.inference_mode():
        for context, rows, lines in cases:
            name = f"attention of {rows} rows over {context} tokens, {lines} lines"
            report.run(name, partial(measure, layer, context, rows, lines, bandwidth, options.dry))
    raise SystemExit(report.num_failed > 0)


if __name__ == "__main__":
    main()
