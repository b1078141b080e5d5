"""Part (d): time of the exact product beside cuBLAS, by shape, rows and splits.

Usage: dev/gpu/run.sh [--dry] [FOLDER], which runs all parts.

The shapes are those of Llama-3-8B. There are several weights of each, whose bytes together exceed the L2 cache, as in
the layers of a model. All products of a shape run in one CUDA graph. `share` is the share of the time that reading the
weight once would take. `planned` is the number of splits that exact models use; the others show whether another
constant would be faster. `lines_32` and `lines_64` are tiles of more rows, which nothing uses: their rows may have
other bits, and `same_bits` shows it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure_attention import REPEATS, capture, measure_bandwidth, measure_seconds
from report import Report
from torch import Tensor
from torch.nn import functional as F

from foredraft.kernels.gpu.product import LINES, ProductPlan, multiply
from tests.support.gpu_cases import DEVICE

L2_BYTES = 300 << 20  # weights of a shape together, at least
SHAPES = {
    "q, o": (4096, 4096), "k, v": (1024, 4096), "gate, up": (14336, 4096), "down": (4096, 14336),
    "head": (128256, 4096),
}  # fmt: skip
ROWS = (1, 4, 16, 64)
PROMPT = 2048
SPLITS = (1, 2, 4, 8, 16)
MANY_LINES = (32, 64)


@dataclass(frozen=True)
class Products:
    """The same rows times several weights of one shape."""

    x: Tensor  # [T, K]
    weights: Sequence[Tensor]  # [N, K] each

    @classmethod
    def make(cls, shape: tuple[int, int], rows: int, num_weights: int) -> "Products":
        dtype = torch.bfloat16
        x = torch.randn(rows, shape[1], device=DEVICE, dtype=dtype)
        weights = [torch.randn(shape, device=DEVICE, dtype=dtype) * shape[1] ** -0.5 for _ in range(num_weights)]
        return cls(x, weights)

    def run(self, plan: ProductPlan) -> Tensor:
        for weight in self.weights:
            out = multiply(self.x, weight, None, plan)
        return out

    def run_torch(self) -> Tensor:
        for weight in self.weights:
            out = F.linear(self.x, weight)
        return out


def measure(shape: tuple[int, int], rows: int, bandwidth: float, is_dry: bool) -> tuple[bool, dict[str, Any]]:
    """Compare the product with that of torch, and measure both."""
    num_bytes = shape[0] * shape[1] * torch.bfloat16.itemsize
    num_weights = 1 if is_dry else max(1, min(32, -(-L2_BYTES // num_bytes)))
    products, plan = Products.make(shape, rows, num_weights), ProductPlan.make(*shape, torch.bfloat16.itemsize)
    ours, theirs = products.run(plan).float(), products.run_torch().float()
    error = ((ours - theirs).abs() / theirs.abs().clamp_min(1)).max().item()
    figures: dict[str, Any] = {"planned": plan.splits, "error": f"{error:.1e}"}
    if not is_dry:

        def time_plan(**sizes: int) -> float:
            return measure_seconds(capture(partial(products.run, replace(plan, **sizes))), REPEATS) / num_weights

        ideal, seconds = num_bytes / bandwidth, time_plan()
        cublas = measure_seconds(capture(products.run_torch), REPEATS) / num_weights
        figures |= {
            "us": round(seconds * 1e6, 1), "cublas_us": round(cublas * 1e6, 1), "bytes_us": round(ideal * 1e6, 1),
            "share": round(ideal / seconds, 3), "cublas_over_ours": round(cublas / seconds, 3),
        }  # fmt: skip
        if rows <= max(ROWS):
            tiles = -(-shape[1] // plan.inputs)
            figures |= {f"splits_{n}_us": round(time_plan(splits=n) * 1e6, 1) for n in SPLITS if n <= tiles}
        for lines in MANY_LINES if rows > LINES else ():
            figures[f"lines_{lines}_us"] = round(time_plan(lines=lines) * 1e6, 1)
            has_same_bits = torch.equal(products.run(replace(plan, lines=lines)), products.run(plan))
            figures[f"lines_{lines}_same_bits"] = has_same_bits
    return error <= 2 * torch.finfo(torch.bfloat16).eps, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small cases in triton's interpreter, and no times")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    options = parser.parse_args()
    report = Report(options.out)
    shapes = {"small": (97, 600)} if options.dry else SHAPES
    torch.manual_seed(0)
    bandwidth = 0.0 if options.dry else measure_bandwidth(4 << 30)
    with torch.inference_mode():
        for name, shape in shapes.items():
            for rows in (5,) if options.dry else (*ROWS, PROMPT):
                title = f"product of {rows} rows by {shape[0]} x {shape[1]} ({name})"
                report.run(title, partial(measure, shape, rows, bandwidth, options.dry))
    raise SystemExit(report.num_failed > 0)


if __name__ == "__main__":
    main()
