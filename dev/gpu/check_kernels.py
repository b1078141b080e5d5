"""Part (a): every kernel against its oracle in all types, and the bits of rows across passes of 1 to 64 rows.

Usage: dev/gpu/run.sh [--dry] [FOLDER], which runs all parts.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import Report
from torch import Tensor

from foredraft.models.draft_layer import apply_rotary
from foredraft.models.forward_batch import Span
from foredraft.verification.device import pack_step
from foredraft.verification.rules import BLOCK, MATCH, REJECT
from tests.support.gpu_cases import (
    DEVICE,
    AttentionCase,
    Heads,
    bound_error,
    make_chain,
    make_tree,
    scatter_pages,
)
from tests.support.walk_cases import WalkCase
from tests.support.walk_cases import make_case as make_walk_case

Check = tuple[bool | None, dict[str, Any]]  # None: a figure that is neither right nor wrong
PAGE_SIZE = 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODELS = {
    "llama-8b": Heads(4, 8, 128),
    "qwen3-0.6b": Heads(2, 8, 128),
    "gpt-oss": Heads(8, 8, 64, window=128, has_sinks=True),
    "gemma2-2b": Heads(2, 4, 256, window=700, softcap=50.0),
    "gpt2": Heads(1, 12, 64),
    "group of 20": Heads(20, 2, 128),
}
WHOLE, SPLITS = 0, 1 << 20  # AttentionPlan.busy_programs: one program for all splits of a row, or one per split


def list_tree_parents(size: int) -> list[int]:
    """List the parents of a tree with many branches."""
    return [-1, *[max(0, node - 1 - node % 4) for node in range(1, size)]]


def make_case(heads: Heads, spans: Sequence[tuple[int, int, bool]], dtype: torch.dtype) -> AttentionCase:
    """Make a case of requests (committed tokens, rows, whether they are a tree) on scattered pages."""
    lengths = [start + size for start, size, _ in spans]
    num_pages = sum(-(-length // PAGE_SIZE) for length in lengths) + max(lengths) // PAGE_SIZE + 3
    pages = scatter_pages(lengths, 0, PAGE_SIZE, num_pages)
    made: list[Span] = [
        make_tree(own, start, list_tree_parents(size)) if is_tree else make_chain(own, start, size)
        for own, (start, size, is_tree) in zip(pages, spans, strict=True)
    ]
    return AttentionCase.make(heads, made, dtype, PAGE_SIZE, num_pages)


def check_against_float64(heads: Heads, spans: Sequence[tuple[int, int, bool]], dtype: torch.dtype) -> Check:
    case = make_case(heads, spans, dtype)
    reference, worst = case.reference(), 0.0
    for programs in (WHOLE, SPLITS):
        out = case.run_plan(busy_programs=programs)
        worst = max(worst, (out.double() - reference).abs().max().item())
    bound = bound_error(case)
    return worst <= bound, {"error": f"{worst:.2e}", "bound": f"{bound:.2e}"}


def check_modes(heads: Heads, spans: Sequence[tuple[int, int, bool]], dtype: torch.dtype) -> Check:
    """Compare the bits of one program per row with those of one program per split."""
    case = make_case(heads, spans, dtype)
    return count_equal(case.run_plan(busy_programs=WHOLE), case.run_plan(busy_programs=SPLITS))


def check_row_counts(heads: Heads, start: int, counts: Sequence[int], dtype: torch.dtype) -> Check:
    """Compare the rows of passes of M rows with the same rows in the pass of most rows."""
    case = make_case(heads, [(start, max(counts), False)], dtype)
    together, different = case.run_plan(), []
    (span,) = case.spans
    for count in counts:
        part = replace(case, spans=[span._replace(tokens=span.tokens[:count])]).select_span(0)
        if not torch.equal(part.run_plan(), together[:count]):
            different.append(count)
    return not different, {"passes": len(counts), "different": different[:8]}


def check_rows_alone(heads: Heads, spans: Sequence[tuple[int, int, bool]], dtype: torch.dtype, step: int) -> Check:
    """Compare rows of trees, chains and prompts with the same sequence decoded alone on other pages."""
    case = make_case(heads, spans, dtype)
    together = case.run_plan()
    rows = list(range(0, len(together), step))
    different = [row for row in rows if not torch.equal(case.select_row(row).run_plan()[0], together[row])]
    return not different, {"rows": len(rows), "different": different[:8]}


def count_equal(a: Tensor, b: Tensor) -> Check:
    differing = int((a != b).sum())
    return differing == 0, {"numbers": a.numel(), "different": differing}


def make_normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check_store(dtype: torch.dtype) -> Check:
    from foredraft.kernels.gpu.store import store

    k = make_normal(8, 33, 128, dtype=dtype).transpose(0, 1)
    keys, values = (torch.zeros(200, 8, 128, dtype=dtype, device=DEVICE) for _ in range(2))
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:33].to(DEVICE)
    store(k, k + 1, slots, keys, values)
    expected = [torch.zeros_like(keys).index_copy_(0, slots, x.contiguous()) for x in (k, k + 1)]
    return count_equal(torch.stack([keys, values]), torch.stack(expected))


def check_rotation(dtype: torch.dtype) -> Check:
    from foredraft.kernels.gpu.store import rotate_and_store

    q, k = make_normal(33, 32, 128, dtype=dtype), make_normal(33, 8, 128, dtype=dtype, seed=1)
    angles = make_normal(33, 64, dtype=torch.float32, seed=2) * 9
    keys, values = (torch.zeros(64, 8, 128, dtype=dtype, device=DEVICE) for _ in range(2))
    slots = torch.arange(33, device=DEVICE) + 7
    rotated = rotate_and_store(q, k, k, angles.cos(), angles.sin(), slots, keys, values)
    cosines, sines = (torch.cat([x, x], -1)[None].double() for x in (angles.cos(), angles.sin()))
    pairs = ((rotated, q), (keys[slots], k))
    error = max(
        (ours.double() - apply_rotary(x[None].double(), (cosines, sines))[0]).abs().max().item() for ours, x in pairs
    )
    bound = 8 * torch.finfo(dtype).eps
    return error <= bound, {"error": f"{error:.2e}", "bound": f"{bound:.2e}"}


def check_move(dtype: torch.dtype) -> Check:
    from foredraft.kernels.gpu.move import PointerTable, move

    tensors = [make_normal(300, 8, 128, dtype=dtype, seed=seed) for seed in range(8)]
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:101].to(DEVICE)
    sources, targets = order[:-1].contiguous(), order[1:].contiguous()
    expected = [tensor.clone().index_copy_(0, targets, tensor[sources]) for tensor in tensors]
    move(PointerTable.make(tensors), sources, targets)
    return count_equal(torch.stack(tensors), torch.stack(expected))


def check_norm(dtype: torch.dtype) -> Check:
    from foredraft.kernels.gpu.norm import normalize

    x, weight = make_normal(65, 4096, dtype=dtype), make_normal(4096, dtype=dtype, seed=1)
    out, _ = normalize(x, weight, 1e-5)
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    error = ((out.double() - expected).abs() / expected.abs().clamp_min(1e-3)).max().item()
    alone = torch.cat([normalize(x[row : row + 1], weight, 1e-5)[0] for row in range(0, 65, 16)])
    bound = 3 * torch.finfo(dtype).eps
    is_same = torch.equal(alone, out[::16])
    return error <= bound and is_same, {"relative_error": f"{error:.2e}", "bound": f"{bound:.2e}", "same_bits": is_same}


def make_product(shape: tuple[int, int], dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make rows, a weight and a bias."""
    x, weight = make_normal(rows, shape[1], dtype=dtype), make_normal(*shape, dtype=dtype, seed=1)
    return x, weight, make_normal(shape[0], dtype=dtype, seed=2)


def check_product(shape: tuple[int, int], dtype: torch.dtype) -> Check:
    from foredraft.kernels.gpu.product import multiply

    x, weight, bias = make_product(shape, dtype, 33)
    expected = x.double() @ weight.double().T + bias.double()
    error = ((multiply(x, weight, bias).double() - expected).abs() / (expected.abs() + shape[1] ** 0.5)).max().item()
    bound = torch.finfo(dtype).eps + 2 * shape[1] ** 0.5 * torch.finfo(torch.float32).eps
    return error <= bound, {"relative_error": f"{error:.2e}", "bound": f"{bound:.2e}"}


def check_product_rows(shape: tuple[int, int], dtype: torch.dtype, counts: Sequence[int], lines: int = 16) -> Check:
    """Compare the rows of passes of M rows with the same rows at other places of the pass of most rows.

    With `lines` other than 16, the pass of most rows has tiles of this many rows, and the result is a figure alone: it
    says whether they may take the place of small tiles.
    """
    from foredraft.kernels.gpu.product import ProductPlan, multiply

    x, weight, bias = make_product(shape, dtype, max(counts))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    plan = replace(ProductPlan.make(*shape, dtype.itemsize), lines=lines)
    together = torch.empty_like(multiply(x, weight, bias))
    together[order] = multiply(x[order], weight, bias, plan)
    different = [n for n in counts if not torch.equal(multiply(x[:n], weight, bias), together[:n])]
    is_right = not different if lines == 16 else None
    return is_right, {"passes": len(counts), "different": different[:8], "splits": plan.splits}


def check_layer_norm(dtype: torch.dtype) -> Check:
    from foredraft.kernels.gpu.layer_norm import normalize_layer

    x, weight, bias = (
        make_normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(((65, 4096), (4096,), (4096,)))
    )
    out = normalize_layer(x, weight, bias, 1e-5)
    expected = torch.nn.functional.layer_norm(x.double(), (4096,), weight.double(), bias.double(), 1e-5)
    error = ((out.double() - expected).abs() / expected.abs().clamp_min(0.1)).max().item()
    alone = torch.cat([normalize_layer(x[row : row + 1], weight, bias, 1e-5) for row in range(0, 65, 16)])
    bound, is_same = 2 * torch.finfo(dtype).eps + 1e-5, torch.equal(alone, out[::16])
    return error <= bound and is_same, {"relative_error": f"{error:.2e}", "bound": f"{bound:.2e}", "same_bits": is_same}


def list_product_checks(is_dry: bool) -> list[tuple[str, Callable[[], Check]]]:
    """List the checks of exact products at the shapes of Llama-3-8B."""
    shapes = [(97, 600)] if is_dry else [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096)]
    counts = (1, 3, 5, 20) if is_dry else (*range(1, 65), 65, 200, 1024)
    checks: list[tuple[str, Callable[[], Check]]] = []
    for kind, dtype in DTYPES.items():
        for shape in shapes:
            title = f"{shape[0]} x {shape[1]} {kind}"
            checks += [
                (f"row bits of products in passes of other sizes, {title}",
                 partial(check_product_rows, shape, dtype, counts)),
                (f"product against float64, {title}", partial(check_product, shape, dtype)),
                *((f"row bits of tiles of {lines} rows, {title}",
                   partial(check_product_rows, shape, dtype, counts[-4:], lines)) for lines in (32, 64)),
            ]  # fmt: skip
    return checks


def check_verification(size: int, seeds: Sequence[int], sizes: Sequence[int]) -> Check:
    """Compare commits of random steps with those of the rules on the CPU; on a GPU also those of a captured graph."""
    rules = (MATCH, REJECT, BLOCK, REJECT, MATCH)
    num_accepted, different, differing_replays = 0, [], []
    for seed in seeds:
        case = make_walk_case(rules, size, seed, (torch.bfloat16, torch.float32)[seed % 2])
        expected, got = case.reference(), case.run(*sizes)
        num_accepted += sum(max(count - 1, 0) for count in expected.counts)
        if (got.paths, got.tokens, got.failed) != (expected.paths, expected.tokens, expected.failed):
            different.append(seed)
        if DEVICE == "cuda" and not is_replay_equal(case):
            differing_replays.append(seed)
    figures = {"steps": len(seeds), "accepted": num_accepted, "different": different[:8]}
    figures |= {"different_replays": differing_replays[:8]} if DEVICE == "cuda" else {}
    return num_accepted > 0 and not different and not differing_replays, figures


def is_replay_equal(case: WalkCase) -> bool:
    """Return whether a graph that was captured with other logits gives the results of launches, without a wait."""
    from foredraft.kernels.gpu.verify import walk_trees

    probs = case.make_probs(DEVICE)
    q, block = pack_step(case.tree, probs, case.noise, case.rules)
    logits = torch.zeros_like(probs.logits)
    walk_trees(logits, q, block)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = walk_trees(logits, q, block)
        logits.copy_(probs.logits)
        graph.replay()
        launched = walk_trees(logits, q, block)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.equal(out, launched)


def list_checks(is_dry: bool) -> list[tuple[str, Callable[[], Check]]]:
    """List the checks, the most valuable first: bits of rows, then results, then the small kernels."""
    models = {name: replace(heads, kv_heads=1) for name, heads in MODELS.items()} if is_dry else MODELS
    models = {name: models[name] for name in ("gpt-oss", "group of 20")} if is_dry else models
    batch = [(130, 3, False), (40, 5, True)] if is_dry else [(1500, 13, True), (3, 1, False), (700, 8, False),
             (0, 90, False), (4000, 1, False)]  # fmt: skip
    start, counts = (140, (1, 3, 5)) if is_dry else (1500, range(1, 65))
    step = 3 if is_dry else 5
    checks = list_product_checks(is_dry)
    dtypes = {"bf16": DTYPES["bf16"]} if is_dry else DTYPES
    for kind, dtype in dtypes.items():
        for name, heads in models.items():
            title = f"{name} {kind}"
            checks += [
                (
                    f"row bits across 1..{max(counts)} rows, {title}",
                    partial(check_row_counts, heads, start, counts, dtype),
                ),
                (f"row bits alone and with batch mates, {title}", partial(check_rows_alone, heads, batch, dtype, step)),
                (f"bits of one program and of splits, {title}", partial(check_modes, heads, batch, dtype)),
                (f"attention against float64, {title}", partial(check_against_float64, heads, batch, dtype)),
            ]
    size, seeds, sizes = (40, range(2), (64, 24)) if is_dry else (128_256, range(24), (2048, 8192))
    checks.append(("verification: commits of the rules on the CPU", partial(check_verification, size, seeds, sizes)))
    for kind, dtype in DTYPES.items():
        for name, check in (("store", check_store), ("rotation", check_rotation), ("move", check_move),
                            ("norm", check_norm), ("layer norm", check_layer_norm)):  # fmt: skip
            checks.append((f"{name} {kind}", partial(check, dtype)))
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small cases in triton's interpreter")
    parser.add_argument("--match", default="", help="run the checks whose name has this part")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    options = parser.parse_args()
    report = Report(options.out)
    for name, check in list_checks(options.dry):
        if options.match in name:
            report.run(name, check)
    raise SystemExit(report.num_failed > 0)


if __name__ == "__main__":
    main()
