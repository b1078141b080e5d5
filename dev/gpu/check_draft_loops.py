"""Part (d): draft loops in CUDA graphs: the drafts of growth level by level, and their time at the sizes of an 8B head.

Usage: dev/gpu/run.sh [--dry] [FOLDER], which runs all parts.

The head is EAGLE-3 with random weights. In float32 the drafts must be equal. In bfloat16, passes of other numbers of
rows may round differently, so the share of equal draft tokens is a figure. `graph` is the time of the replay alone, by
events; `loop` that of a whole proposal with it, and `levels` that of a proposal level by level, by the clock.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Report
from torch import Tensor, nn

from foredraft.drafters.common.feature_drafter import FeatureDrafter, make_feature_lm
from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.eagle3.network import Eagle3Network
from foredraft.drafters.eagle3.shape import Eagle3Shape
from foredraft.drafters.method import DrafterContext
from foredraft.kernels.gpu.graphs import CallingRecorder, Outputs, RecordedLaunches, Recorder, make_recorder
from foredraft.kernels.gpu.loading import load_kernels
from foredraft.models.draft_layer import DraftLayerShape
from foredraft.request import Batch
from foredraft.sampling.params import Sampling
from tests.support.draft_loops import Twins, make_pair
from tests.support.gpu_cases import DEVICE

Check = tuple[bool | None, dict[str, Any]]
SMALL = DraftLayerShape(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=32)
LARGE = DraftLayerShape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, max_positions=1 << 16)
GREEDY = Sampling(max_tokens=1 << 16, temperature=0, ignore_eos=True)
SAMPLED = Sampling(max_tokens=1 << 16, temperature=0.9, top_p=0.95, ignore_eos=True)
SHAPES: dict[str, Callable[[int], TreeSpec]] = {
    "chain": TreeSpec.from_options,
    "static tree": lambda depth: TreeSpec.from_options(depth, branching=(3, 2, 1, 1, 1, 1)[:depth]),
    "dynamic tree": lambda depth: TreeSpec.from_options(depth, tree_nodes=24, top_k=4),
}
REPEATS = 20


@dataclass(frozen=True)
class TargetTables:
    """The part of a target that the head reads: an embedding."""

    embedding: Tensor


@dataclass
class KeepingRecorder:
    """Recorder that keeps its last recording, which is measured."""

    recorder: Recorder
    last: Any = None

    def record(self, run: Callable[[], Outputs]) -> RecordedLaunches:
        self.last = self.recorder.record(run)
        return self.last  # type: ignore[no-any-return]


@dataclass(frozen=True)
class HeadCase:
    """Sizes of a head, and of the requests that it drafts for."""

    block: DraftLayerShape
    dtype: torch.dtype
    vocab_size: int
    draft_vocab_size: int
    contexts: Sequence[int]  # committed tokens of every request
    page_size: int = 16

    def make_network(self) -> Eagle3Network:
        """Make a network with random weights of the size that keeps the states near 1."""
        hidden = self.block.hidden
        noise = torch.Generator(DEVICE).manual_seed(0)
        table = torch.randn(self.vocab_size, hidden, generator=noise, device=DEVICE, dtype=self.dtype)
        shape = Eagle3Shape(self.block, self.vocab_size, self.draft_vocab_size, hidden, (1, 2, 3))
        tables: Any = TargetTables(table)
        with torch.device(DEVICE):
            network = Eagle3Network(shape, tables).to(self.dtype).eval().requires_grad_(False)
        for weight in network.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=noise)
        nn.init.normal_(network.lm_head.weight, std=3 * hidden**-0.5, generator=noise)  # far from uniform
        spacing = self.vocab_size // self.draft_vocab_size
        network.get_buffer("d2t").copy_(torch.arange(self.draft_vocab_size) * (spacing - 1))
        return network

    def make_twins(self, spec: TreeSpec, rules: Mapping[str, Sampling]) -> Twins:
        """Make a drafter with a loop and one without, after the contexts of the requests."""
        network = self.make_network()
        device = torch.device(DEVICE)
        context = DrafterContext(self.vocab_size, None, spec.max_depth, dtype=self.dtype, device=device, fused=False)
        recorder = KeepingRecorder(make_recorder(device) or CallingRecorder())

        def make() -> FeatureDrafter:
            lm = make_feature_lm(network, lambda _: None, context)
            return FeatureDrafter(lm, network.shape.hidden_layers, spec, context, network.token_ids)

        room = max(self.contexts) + 200
        num_pages = 1 + len(self.contexts) * (-(-room // self.page_size))
        pair = make_pair(make, recorder, load_kernels(), num_pages * self.page_size)
        twins = Twins(
            *pair, 3 * self.block.hidden, self.vocab_size, DEVICE, self.dtype, 1e-3, self.page_size, num_pages=num_pages
        )
        kinds = list(rules.items())
        for i in range(len(self.contexts)):
            rule, sampling = kinds[i % len(kinds)]
            twins.add(sampling, rule, room=room)
        twins.start(self.contexts)
        return twins


def check_equality(case: HeadCase, spec: TreeSpec, rules: Mapping[str, Sampling]) -> Check:
    """Draft some steps with both; a difference raises."""
    twins, count = case.make_twins(spec, rules), len(case.contexts)
    trees = [twins.step([spec.max_nodes - (step + b) % 3 for b in range(count)]) for step in range(3)]
    loop = twins.looping.loop
    return loop.num_replays == len(trees), {
        "nodes": sum(len(tokens) - 1 for tree in trees for tokens in tree.tokens),
        "refusals": list(loop.refusals),
    }


@torch.inference_mode()
def measure(case: HeadCase, spec: TreeSpec, rules: Mapping[str, Sampling], repeats: int) -> Check:
    """Measure proposals of both drafters in one state."""
    twins = case.make_twins(spec, rules)
    count = len(case.contexts)
    batch = Batch(tuple(twins.requests), (1,) * count, (spec.max_nodes,) * count, case.page_size)
    drafters = (twins.looping, twins.reference)
    trees = [drafter.propose(batch) for drafter in drafters]
    both = zip(*(tree.tokens for tree in trees), strict=True)
    pairs = [pair for mine, theirs in both for pair in zip(mine, theirs, strict=False)]
    loop, levels = (_measure_clock(partial(drafter.propose, batch), repeats) for drafter in drafters)
    refusals = list(twins.looping.loop.refusals)
    assert not refusals, f"the drafts grew level by level: {refusals}"
    graph = _measure_events(twins.looping.loop.recorder.last, repeats)
    return None, {
        "graph_ms": f"{1e3 * graph:.3f}",
        "loop_ms": f"{1e3 * loop:.3f}",
        "levels_ms": f"{1e3 * levels:.3f}",
        "equal_tokens": f"{sum(a == b for a, b in pairs) / len(pairs):.3f}",
    }


def _measure_clock(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()  # it ends with a transfer to the host
        times.append(time.perf_counter() - begin)
    return median(times)


def _measure_events(run: Callable[[], object], repeats: int) -> float:
    if DEVICE != "cuda":
        return _measure_clock(run, repeats)
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()  # type: ignore[no-untyped-call]
        run()
        end.record()  # type: ignore[no-untyped-call]
        end.synchronize()
        times.append(1e-3 * begin.elapsed_time(end))
    return median(times)


def list_checks(is_dry: bool) -> list[tuple[str, Callable[[], Check]]]:
    """List the checks: equality first, then times."""
    small = HeadCase(SMALL, torch.float32, 256, 96, (3, 40, 17) if is_dry else (3, 700, 90, 1500, 17))
    depth = 2 if is_dry else 6
    both = {"match": GREEDY, "reject": SAMPLED}
    checks: list[tuple[str, Callable[[], Check]]] = []
    for name, make in SHAPES.items():
        if is_dry and name == "static tree":
            continue
        checks.append((f"draft loop equals levels, {name}", partial(check_equality, small, make(depth), both)))
    if is_dry:
        checks.append(("times, chain of 2", partial(measure, small, SHAPES["chain"](2), {"match": GREEDY}, 1)))
        return checks
    for count in (1, 4, 16):
        for context in (1 << 10, 1 << 13):
            large = HeadCase(LARGE, torch.bfloat16, 128256, 32000, (context,) * count)
            for name in ("chain", "dynamic tree"):
                for rule, sampling in (("match", GREEDY), ("reject", SAMPLED)):
                    title = f"EAGLE-3 of 8B, {name} of depth 6, {count} requests of {context}, {rule}"
                    checks.append((title, partial(measure, large, SHAPES[name](6), {rule: sampling}, REPEATS)))
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
