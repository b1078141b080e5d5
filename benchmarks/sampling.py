"""Time to sample tokens from logits, natively and by torch's operators, against the goals.

    python benchmarks/sampling.py [--vocab 131072] [--rounds 40] [--threads 1] [--reference-rounds 4] [--json FILE]

Logits are those of text (a bulk and 30 peaks, as in step_overhead.py) or flat (normal numbers at temperature 2). The
native sampler and the reference run in turn in every round, over the same rows and new keys; figures are medians over
the rounds, in microseconds of a call of `sample_tokens`, Python included. The last line has the time to read a row's
logits from memory with one thread. `equal` counts the rows of the rounds with a
reference whose token equals that of the reference.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from foredraft import Sampling
from foredraft.bench.machine_speed import measure_bandwidth
from foredraft.kernels.sampler import find_sampler
from foredraft.sampling import rng
from foredraft.sampling.distribution import compute_reference_probs, process_logits
from foredraft.sampling.token_sampler import sample_tokens

STREAMS = 16
ROW_GOAL, STEP_GOAL, FLAT_FACTOR = 60, 1500, 2  # microseconds of a row, of a step of 16 rows with top-p 0.9
BANDWIDTH_ROUNDS = 5
HOT = 2.0  # temperature of the flat rows
# label -> settings, goal of one row, goal of 16 rows; None = no goal
CASES = {
    "temperature 1": (Sampling(), ROW_GOAL, None),
    "top-p 0.9": (Sampling(top_p=0.9), None, STEP_GOAL),
    "top-k 50": (Sampling(top_k=50), None, None),
    "min-p 0.05": (Sampling(min_p=0.05), None, None),
    "typical 0.9": (Sampling(typical_p=0.9), None, None),
}


@dataclass(frozen=True)
class Timing:
    """Median times of one case, in microseconds of a call."""

    logits: str
    settings: str
    rows: int
    native: float
    reference: float
    goal: float | None
    equal: str


def make_logits(vocab_size: int) -> dict[str, Tensor]:
    """Make STREAMS rows of each kind."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(STREAMS, vocab_size, generator=generator) * 1.5
    common = torch.randint(0, min(vocab_size, 4000), (STREAMS, 30), generator=generator)
    peaks = torch.linspace(13, 5, 30) + torch.randn(STREAMS, 30, generator=generator)
    return {"text": text.scatter_(1, common, peaks), "flat": torch.randn(STREAMS, vocab_size, generator=generator)}


def sample_by_reference(logits: Tensor, samplings: list[Sampling], keys: list[int]) -> list[int]:
    p = compute_reference_probs(process_logits(logits, ()), samplings)
    return [rng.race_argmax(row, key) for row, key in zip(p.numpy(), keys, strict=True)]


def take_time(call: Callable[[], list[int]]) -> tuple[float, list[int]]:
    start = time.perf_counter()
    tokens = call()
    return (time.perf_counter() - start) * 1e6, tokens


def measure(kind: str, label: str, logits: Tensor, sampling: Sampling, goal: float | None, args) -> Timing:
    rows = len(logits)
    samplings = [sampling] * rows
    native, reference, equal = [], [], 0
    for i in range(args.rounds + 1):
        keys = [rng.derive_key(i, row) for row in range(rows)]
        seconds, tokens = take_time(lambda keys=keys: sample_tokens(logits, range(rows), samplings, keys))
        if i:  # the first round warms up
            native.append(seconds)
        if i < args.reference_rounds:
            seconds, expected = take_time(lambda keys=keys: sample_by_reference(logits, samplings, keys))
            reference.append(seconds)
            equal += sum(a == b for a, b in zip(tokens, expected, strict=True))
    count = f"{equal}/{rows * args.reference_rounds}"
    return Timing(kind, label, rows, statistics.median(native), statistics.median(reference), goal, count)


def format_line(t: Timing) -> str:
    goal = "" if t.goal is None else f"{t.goal:.0f}"
    result = "" if t.goal is None else "reached" if t.native <= t.goal else "missed"
    cells = (t.logits, t.settings, t.rows, f"{t.native:.0f}", f"{t.native / t.rows:.0f}", f"{t.reference:.0f}")
    return "| " + " | ".join(map(str, (*cells, f"{t.reference / t.native:.1f}x", goal, result, t.equal))) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--reference-rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sampler = find_sampler(torch.zeros(1, 1))
    if sampler is None:
        parser.error("the native library is not built; run: python -m foredraft.kernels.cpu.build")
    print(f"V = {args.vocab}, {args.threads} thread(s), {sampler.library.instruction_set}\n")
    print("| logits | settings | rows | native, us | a row | torch, us | torch / native | goal, us | | equal tokens |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---|---:|")
    timings = []
    for kind, logits in make_logits(args.vocab).items():
        factor = FLAT_FACTOR if kind == "flat" else 1
        for label, (sampling, row_goal, step_goal) in CASES.items():
            settings = sampling if kind == "text" else Sampling(**{**asdict_filters(sampling), "temperature": HOT})
            for rows, goal in ((1, row_goal), (STREAMS, step_goal)):
                limit = None if goal is None else goal * factor
                timings.append(measure(kind, label, logits[:rows], settings, limit, args))
                print(format_line(timings[-1]), flush=True)
    speed = measure_bandwidth(sampler.library, BANDWIDTH_ROUNDS).one_thread
    size = 4 * args.vocab
    print(f"\nlimit by bytes: {size / speed / 1e3:.0f} us for the {size / 1e3:.0f} KB of a row, at {speed:.1f} GB/s")
    if args.json:
        args.json.write_text(json.dumps([asdict(t) for t in timings], indent=1))


def asdict_filters(sampling: Sampling) -> dict[str, float]:
    """Return the filters of a setting by name."""
    return {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p", "typical_p")}


if __name__ == "__main__":
    main()
