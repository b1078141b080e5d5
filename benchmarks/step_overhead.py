"""Cost of a step besides the models, measured with the real engine and a target that looks up its logits.

    python benchmarks/step_overhead.py [--steps 300] [--batches 1,16] [--drafts 0,4] [--vocab 4096,131072] [--profile]

The table has microseconds per step by part, on one thread. Figures are lower quartiles over the steps, because other
work on the machine can only add time. `forward` is the stub of the target. `propose` is the sandbox around a drafter
that returns the likeliest tokens with some errors. Neither is part of the total. In modes with `q` every draft token
has the distribution of the target at temperature 1.2 as its q, as if it was sampled from it.
"""

import argparse
import cProfile
import itertools
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foredraft import RequestOptions, Sampling, zoo
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.engine import engine as engine_module
from foredraft.engine.engine import Engine
from foredraft.engine.scheduler import SchedulerLimits
from foredraft.kv.allocator import PageAllocator
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.loading import load_tokenizer
from foredraft.request import Batch
from foredraft.request_factory import RequestFactory
from foredraft.tree import Commit, TokenTree
from foredraft.verification.registry import RULES

try:
    from foredraft.drafters.spec import DrafterSpec
except ImportError:  # an older checkout, for compare_checkouts.py
    DrafterSpec = None

PERIOD = 61  # rows of logits; the row after a token depends on its position alone
ERROR = 4  # every ERROR-th position has a wrong draft token
WARM_UP_STEPS = 10  # includes the prompts
TOP_FUNCTIONS = 40  # lines of a profile
# Label -> sampling parameters and verification rule.
MODES = {
    "greedy": (Sampling(temperature=0, max_tokens=1 << 17), "match"),
    "match": (Sampling(max_tokens=1 << 17), "match"),
    "match top-p 0.9": (Sampling(top_p=0.9, max_tokens=1 << 17), "match"),
    "match top-k 50": (Sampling(top_k=50, max_tokens=1 << 17), "match"),
    "reject top-p 0.9": (Sampling(top_p=0.9, max_tokens=1 << 17), "reject"),
    "reject": (Sampling(max_tokens=1 << 17), "reject"),
    "block": (Sampling(max_tokens=1 << 17), "block"),
    "reject with q": (Sampling(max_tokens=1 << 17), "reject"),
    "block with q": (Sampling(max_tokens=1 << 17), "block"),
}
MODES_WITH_Q = ("reject with q", "block with q")
DRAFT_TEMPERATURE = 1.2


@dataclass
class StubLM:
    """Stub of a target with logits by position, of about the entropy of text."""

    rows: Tensor  # [PERIOD, V]
    context_length: int = 1 << 30
    pool: KVPool = field(default_factory=KVPool)

    @classmethod
    def from_vocab_size(cls, vocab_size: int, dtype: torch.dtype) -> "StubLM":
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(PERIOD, vocab_size, generator=generator) * 1.5
        common = torch.randint(5, 4000, (PERIOD, 30), generator=generator)  # ids in the vocabulary of the tokenizer
        peaks = torch.linspace(13, 5, 30) + torch.randn(PERIOD, 30, generator=generator)
        return cls(rows.scatter_(1, common, peaks).to(dtype))

    @property
    def vocab_size(self) -> int:
        return self.rows.shape[1]

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, None]:
        return self.rows[forward_batch.positions[0][forward_batch.logit_rows] % PERIOD], None


class TableDrafter:
    """Drafter that looks up the likeliest tokens in a table."""

    def __init__(self, lm: StubLM, num_tokens: int, has_q: bool = False) -> None:
        self.max_nodes, self.hidden_layers = num_tokens, ()  # read by checkouts without DrafterSpec
        self.spec = None if DrafterSpec is None else DrafterSpec(num_tokens)
        self._best = lm.rows.argmax(-1).tolist()
        self._q = torch.softmax(lm.rows.float() / DRAFT_TEMPERATURE, -1) if has_q else None

    def propose(self, batch: Batch) -> TokenTree:
        drafts: dict[int, Draft] = {}
        for b in batch.find_drafting():
            first = batch.requests[b].num_tokens - 1
            positions = range(first, first + batch.granted_nodes[b])
            tokens = [self._best[i % PERIOD] + (i % ERROR == 0) for i in positions]
            q = None if self._q is None else self._q[[i % PERIOD for i in (*positions, first)]]
            if q is not None:
                q[-1] = 0  # of the last node, which has no child
            drafts[b] = Draft.from_chain(tokens, q)
        return to_token_tree(batch, drafts)

    def observe(self, batch: Batch, commit: Commit) -> None: ...

    def forget(self, slots: list[int]) -> None: ...


class StepTimers:
    """Timers of the parts of each step, in seconds."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []
        self._originals: list[tuple[object, str, Callable]] = []

    def wrap(self, owner: object, name: str, part: str) -> None:
        call: Callable = getattr(owner, name)

        def call_timed(*args, **kwargs):
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.now[part] = self.now.get(part, 0.0) + time.perf_counter() - start
            return result

        self._originals.append((owner, name, call))
        setattr(owner, name, call_timed)

    def restore(self) -> None:
        """Undo `wrap`: functions of a module are shared with the engines that follow."""
        for owner, name, call in self._originals:
            setattr(owner, name, call)

    def step(self, engine: Engine) -> None:
        self.now = {}
        start = time.perf_counter()
        engine.step()
        self.now["all"] = time.perf_counter() - start
        self.steps.append(self.now)

    def compute_quartile(self, part: str) -> float:
        return statistics.quantiles([step.get(part, 0.0) for step in self.steps], n=4)[0] * 1e6


# Parts of the engine, and parts that do not count in the total.
PARTS = ("schedule", "window", "text", "observe", "commit", "publish")
MODELS = ("propose", "forward")


def create_engine(lm: StubLM, num_requests: int, num_drafts: int, mode: str, tokenizer: object) -> Engine:
    drafter = TableDrafter(lm, num_drafts, mode in MODES_WITH_Q) if num_drafts else None
    engine = Engine(lm, drafter, PageAllocator(20_000, 16), SchedulerLimits(), torch.device("cpu"))
    sampling, verify = MODES[mode]
    requests = RequestFactory(lm, tokenizer, None, frozenset(), RULES[verify], shares_prefixes=True)  # no grammars
    for index in range(num_requests):
        prompt = [5 + index] * (40 + index)
        (transcript,) = requests.prepare(prompt, replace(sampling, seed=index), RequestOptions(), index)
        engine.add(transcript)
    return engine


def attach_timers(engine: Engine) -> StepTimers:
    timers = StepTimers()
    timers.wrap(engine.scheduler, "schedule", "schedule")
    timers.wrap(engine.drafter, "propose", "propose")
    timers.wrap(engine_module, "find_prompt_logit_requests", "window")
    timers.wrap(engine_module, "build_forward_batch", "window")
    timers.wrap(engine.target, "forward", "forward")
    timers.wrap(engine, "_append_tokens", "text")
    timers.wrap(engine.drafter, "observe", "observe")
    timers.wrap(engine.scheduler, "commit", "commit")
    timers.wrap(engine, "_emit_deltas", "publish")
    return timers


def clear_deltas(engine: Engine) -> None:
    """Remove all deltas, as a caller that reads its stream does."""
    for transcript in engine.transcripts.values():
        transcript.deltas.clear()


def measure(engine: Engine, num_steps: int) -> StepTimers:
    for _ in range(WARM_UP_STEPS):
        engine.step()
    timers = attach_timers(engine)
    for _ in range(num_steps):
        timers.step(engine)
        clear_deltas(engine)
    timers.restore()
    return timers


def profile(engine: Engine, num_steps: int) -> None:
    for _ in range(WARM_UP_STEPS):
        engine.step()
    with cProfile.Profile() as profiler:
        for _ in range(num_steps):
            engine.step()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(TOP_FUNCTIONS)


def format_line(label: str, timers: StepTimers) -> str:
    quartiles = [timers.compute_quartile(part) for part in (*PARTS, *MODELS)]
    total = timers.compute_quartile("all") - sum(timers.compute_quartile(part) for part in MODELS)
    remainder = total - sum(quartiles[: len(PARTS)])
    cells = [f"{value:.0f}" for value in (total, remainder, *quartiles)]
    return f"| {label} | " + " | ".join(cells) + " |"


def parse_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batches", type=parse_numbers, default=[1, 16])
    parser.add_argument("--drafts", type=parse_numbers, default=[0, 4])
    parser.add_argument("--vocab", type=parse_numbers, default=[4096, 131072])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=list(MODES))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = load_tokenizer(str(zoo.find_folder("target")))
    names = ("total", "probs+rule", *PARTS, *(f"({part})" for part in MODELS))
    print("| V, mode, B, K | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for vocab_size in args.vocab:
        lm = StubLM.from_vocab_size(vocab_size, getattr(torch, args.dtype))
        for mode, b, k in itertools.product(args.modes, args.batches, args.drafts):
            engine = create_engine(lm, b, k, mode, tokenizer)
            if args.profile:
                profile(engine, args.steps)
            else:
                steps = min(args.steps, max(20, args.steps * 4096 // vocab_size // b))
                print(format_line(f"{vocab_size}, {mode}, {b}, {k}", measure(engine, steps)), flush=True)


if __name__ == "__main__":
    main()
