"""Parts of a step: host time and device time of each phase of the engine, plain and with drafts.

Usage: dev/gpu/run.sh [--dry] [FOLDER], which runs all parts.

Device time is that between two events on the stream. It includes the time in which the device waits for launches.
The head is untrained: its drafts are rejected, and the times are those of a trained one.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measure_model import CASES, DRY_CASES, Case
from report import Report

from foredraft import LLM, Sampling
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.eagle3 import method as eagle3
from foredraft.drafters.eagle3.training import TrainConfig, create_trainee
from foredraft.drafters.method import DrafterContext
from foredraft.llm import MemoryLimits
from tests.support.gpu_cases import DEVICE

PHASES = ("_plan", "_propose", "_forward", "_verify", "_append_tokens", "_observe", "_emit_deltas", "_finish_step")
SKIPPED = 8  # first steps: compilation, recordings, the prompt
LEVELS, TREE_NODES, CHAIN = 6, 32, 8
LIMITS = MemoryLimits(kv_tokens=1 << 15)  # several engines share the GPU


@dataclass
class StepTimer:
    """Times of the phases of every step of an engine."""

    host: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # seconds
    events: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))

    def watch(self, engine: Any) -> None:
        """Measure the phases of an engine from now on, and the whole step."""
        for name in (*PHASES, "step"):
            setattr(engine, name, self._time(name, getattr(engine, name)))

    def _time(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = self._mark()
            began = time.perf_counter()
            result = run(*args)
            self.host[name].append(time.perf_counter() - began)
            self.events[name].append((begin, self._mark()))
            return result

        return timed

    def _mark(self) -> Any:
        if DEVICE != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def summarize(self) -> dict[str, str]:
        """Return the median milliseconds of host and device by phase."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        figures = {}
        for name in (*PHASES, "step"):
            first = min(SKIPPED, len(self.host[name]) // 2)
            host = statistics.median(self.host[name][first:]) * 1e3
            pairs = self.events[name][first:]
            device = statistics.median([a.elapsed_time(b) for a, b in pairs]) if DEVICE == "cuda" else 0.0
            figures[name.strip("_")] = f"{host:.3f}/{device:.3f}"
        return figures


def make_eagle3(llm: LLM, **options: Any) -> Any:
    """Make an untrained EAGLE-3 head of one layer for a target."""
    target: Any = llm.target
    network = create_trainee(TrainConfig(), target, None).network
    dtype = target.model.dtype
    tensors = {name: weight.detach().to(dtype) for name, weight in network.state_dict().items()}
    checkpoint = Checkpoint(eagle3.METHOD.name, "made", "made", network.shape, tensors)
    context = DrafterContext(
        target.vocab_size, target, LEVELS, dtype=dtype, device=target.device, target_name="random weights"
    )
    assert eagle3.METHOD.from_checkpoint is not None
    return eagle3.METHOD.from_checkpoint(eagle3.METHOD.config(**options), checkpoint, context)


def measure(name: str, llm: LLM, case: Case, report: Report) -> None:
    """Measure the steps of one request."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(5, 90, (case.prompt,), generator=generator).tolist()
    timer = StepTimer()
    timer.watch(llm.engine)
    llm.generate([prompt], Sampling(max_tokens=case.num_tokens, temperature=0, ignore_eos=True))
    report.add(f"{case.name}: {name}, ms of host/device", None, **timer.summarize())


def measure_case(case: Case, report: Report) -> None:
    model = case.make_model()
    plain = LLM(model, None, limits=LIMITS)
    simulated = {"method": "foredraft.simulation:METHOD", "acceptance_rate": 0.8, "num_speculative_tokens": CHAIN}
    measure("plain step", plain, case, report)
    measure(f"chain of {CHAIN}", plain.with_drafter(simulated), case, report)
    measure(f"EAGLE-3, chain of {LEVELS}", plain.with_drafter(make_eagle3(plain)), case, report)
    tree = make_eagle3(plain, tree_nodes=TREE_NODES, top_k=8)
    measure(f"EAGLE-3, tree of {TREE_NODES}", plain.with_drafter(tree), case, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small models on the CPU; the times mean nothing")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    options = parser.parse_args()
    report = Report(options.out)
    torch.manual_seed(0)
    for case in DRY_CASES if options.dry else CASES:
        measure_case(case, report)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    raise SystemExit(report.num_failed > 0)


if __name__ == "__main__":
    main()
