"""What a step costs besides the models: the real engine over a target that only looks its logits up.

    python benchmarks/step_overhead.py [--steps 300] [--batches 1,16] [--drafts 0,4] [--vocab 4096,131072] [--profile]

Microseconds per step by part: lower quartiles over the steps, on one thread, because other work on the machine only
ever adds. `forward` is the stub and `propose` the guard around a drafter
that recites the likeliest tokens, wrong now and then; neither counts in the total.
"""

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft import Sampling, zoo
from foredraft.drafters.base import Draft, plant
from foredraft.engine.engine import Engine
from foredraft.engine.output import Transcript
from foredraft.engine.scheduler import Limits
from foredraft.kv.blocks import PageAllocator
from foredraft.kv.pool import KVPool
from foredraft.models.load import load_tokenizer
from foredraft.models.window import Window
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

PERIOD = 61  # rows of logits; the row after a token depends on its position alone
ERROR = 4  # every so manieth position is drafted wrong
MODES = {
    "greedy": (Sampling(temperature=0, max_tokens=1 << 17), "match"),
    "match": (Sampling(max_tokens=1 << 17), "match"),
    "match top-p 0.9": (Sampling(top_p=0.9, max_tokens=1 << 17), "match"),
    "match top-k 50": (Sampling(top_k=50, max_tokens=1 << 17), "match"),
    "reject top-p 0.9": (Sampling(top_p=0.9, max_tokens=1 << 17), "reject"),
}


@dataclass
class StubLM:
    """Logits by position, of about the entropy of text."""

    rows: Tensor  # [PERIOD, V]
    context_length: int = 1 << 30
    pool: KVPool = field(default_factory=KVPool)

    @classmethod
    def of(cls, vocab_size: int, dtype: torch.dtype) -> "StubLM":
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(PERIOD, vocab_size, generator=generator) * 1.5
        common = torch.randint(5, 4000, (PERIOD, 30), generator=generator)  # ids the tokenizer knows
        peaks = torch.linspace(13, 5, 30) + torch.randn(PERIOD, 30, generator=generator)
        return cls(rows.scatter_(1, common, peaks).to(dtype))

    @property
    def vocab_size(self) -> int:
        return self.rows.shape[1]

    def forward(self, window: Window, taps: tuple[int, ...] = ()) -> tuple[Tensor, None]:
        return self.rows[window.positions[0][window.logit_rows] % PERIOD], None


class Recite:
    """Drafts the likeliest tokens, which it knows by heart."""

    taps: tuple[int, ...] = ()

    def __init__(self, lm: StubLM, num_tokens: int) -> None:
        self.num_nodes = num_tokens
        self._best = lm.rows.argmax(-1).tolist()

    def propose(self, batch: Batch) -> TokenTree:
        drafts: dict[int, Draft] = {}
        for b in batch.drafting():
            first = batch.requests[b].num_tokens - 1
            places = range(first, first + batch.budgets[b])
            drafts[b] = Draft.chain([self._best[i % PERIOD] + (i % ERROR == 0) for i in places])
        return plant(batch, drafts)

    def observe(self, batch: Batch, commit: Commit) -> None: ...

    def forget(self, slots: list[int]) -> None: ...


class Timers:
    """Seconds by part and step."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []

    def wrap(self, owner: object, name: str, part: str) -> None:
        call: Callable = getattr(owner, name)

        def timed(*args, **kwargs):
            began = time.perf_counter()
            result = call(*args, **kwargs)
            self.now[part] = self.now.get(part, 0.0) + time.perf_counter() - began
            return result

        setattr(owner, name, timed)

    def step(self, engine: Engine) -> None:
        self.now = {}
        began = time.perf_counter()
        engine.step()
        self.now["all"] = time.perf_counter() - began
        self.steps.append(self.now)

    def quartile(self, part: str) -> float:
        return statistics.quantiles([step.get(part, 0.0) for step in self.steps], n=4)[0] * 1e6


PARTS = ("schedule", "window", "text", "observe", "commit", "publish")
MODELS = ("propose", "forward")


def engine_of(lm: StubLM, num_requests: int, num_drafts: int, mode: str, tokenizer: object) -> Engine:
    drafter = Recite(lm, num_drafts) if num_drafts else None
    engine = Engine(lm, drafter, PageAllocator(20_000, 16), Limits(), torch.device("cpu"))
    sampling, verify = MODES[mode]
    for index in range(num_requests):
        request = Request(-1, [5 + index] * (40 + index), sampling, seed=index, verify=verify)
        engine.add(Transcript(request, index, tokenizer))
    return engine


def timers_of(engine: Engine) -> Timers:
    timers = Timers()
    timers.wrap(engine.scheduler, "next", "schedule")
    timers.wrap(engine.drafter, "propose", "propose")
    timers.wrap(engine, "_window", "window")
    timers.wrap(engine.target, "forward", "forward")
    timers.wrap(engine, "_cut", "text")
    timers.wrap(engine.drafter, "observe", "observe")
    timers.wrap(engine.scheduler, "commit", "commit")
    timers.wrap(engine, "_publish", "publish")
    return timers


def clear(engine: Engine) -> None:
    """What a caller that reads its stream would do."""
    for transcript in engine.transcripts.values():
        transcript.deltas.clear()


def measure(engine: Engine, num_steps: int) -> Timers:
    for _ in range(10):  # the prompts, and warm caches
        engine.step()
    timers = timers_of(engine)
    for _ in range(num_steps):
        timers.step(engine)
        clear(engine)
    return timers


def profile(engine: Engine, num_steps: int) -> None:
    for _ in range(10):
        engine.step()
    with cProfile.Profile() as profiler:
        for _ in range(num_steps):
            engine.step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


def line(label: str, timers: Timers) -> str:
    every = [timers.quartile(part) for part in (*PARTS, *MODELS)]
    total = timers.quartile("all") - sum(timers.quartile(part) for part in MODELS)
    rest = total - sum(every[: len(PARTS)])
    cells = [f"{value:.0f}" for value in (total, rest, *every)]
    return f"| {label} | " + " | ".join(cells) + " |"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batches", type=numbers, default=[1, 16])
    parser.add_argument("--drafts", type=numbers, default=[0, 4])
    parser.add_argument("--vocab", type=numbers, default=[4096, 131072])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(str(zoo.path("target")))
    names = ("total", "law+rule", *PARTS, *(f"({part})" for part in MODELS))
    print("| V, mode, B, K | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for vocab_size in args.vocab:
        lm = StubLM.of(vocab_size, getattr(torch, args.dtype))
        for mode, b, k in itertools.product(args.modes, args.batches, args.drafts):
            engine = engine_of(lm, b, k, mode, tokenizer)
            if args.profile:
                profile(engine, args.steps)
            else:
                steps = min(args.steps, max(20, args.steps * 4096 // vocab_size // b))
                print(line(f"{vocab_size}, {mode}, {b}, {k}", measure(engine, steps)), flush=True)


if __name__ == "__main__":
    main()
