"""Cost of a step besides models, drafts and sampling, with 64 requests running on the built-in target.

    python benchmarks/bookkeeping.py [--streams 64] [--rounds 3] [--modes off,4,auto] [--json FILE] [--quick]

A closed loop as in serving.py, so that admission, prompts, page tables, prefix hashes and ends are all in it. Every
part is timed by itself, without what it calls of the others, so that the parts add up to the step; `target`, `drafter`
and `sampling and verification` are the work, the rest is bookkeeping, which should be 5 % of the step at most. The
clocks
are in it too: about a third of a microsecond for each call. `--clock cpu` counts the time of the thread that steps,
which other programs on the machine do not lengthen; a pass of the target is on that thread as well as on others.
"""

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foredraft import LLM, Sampling
from foredraft.bench import questions
from foredraft.bench.load import AUTO, OFF, ClosedLoopResult, LoadWorkload
from foredraft.bench.load_drivers import EngineDriver
from foredraft.engine import engine as steps
from foredraft.llm import MemoryLimits

STEP = "everything else"
WORK = ("target", "drafter", "sampling and verification")
ALLOWED = 0.05
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


class PartTimer:
    """Seconds by part, each without the parts it called."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.num_steps = 0
        self._inner: list[float] = []  # of every open call, the seconds its own calls took

    def wrap(self, part: str, call: Callable) -> Callable:
        def run(*args, **kwargs):
            self._inner.append(0.0)
            began = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                whole = self.clock() - began
                self.seconds[part] = self.seconds.get(part, 0.0) + whole - self._inner.pop()
                if self._inner:
                    self._inner[-1] += whole
                else:
                    self.num_steps += 1

        return run

    @contextlib.contextmanager
    def instrument(self, llm: LLM) -> Iterator[None]:
        """Time the parts of an engine's step."""
        with contextlib.ExitStack() as stack:
            for owner, name, part in list_timed_methods(llm):
                stack.enter_context(replace_attribute(owner, name, self.wrap(part, getattr(owner, name))))
            verify = steps.combine_rules
            rule = self.wrap("sampling and verification", lambda rule, *args: rule(*args))
            stack.enter_context(
                replace_attribute(steps, "combine_rules", lambda names: lambda *args: rule(verify(names), *args))
            )
            yield


@contextlib.contextmanager
def replace_attribute(owner: object, name: str, other: Callable) -> Iterator[None]:
    had = vars(owner).get(name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        if had is None:
            delattr(owner, name)
        else:
            setattr(owner, name, had)


def list_timed_methods(llm: LLM) -> list[tuple[object, str, str]]:
    """(whose, method, part). What a part is called must be right: a method that is gone raises AttributeError."""
    engine = llm.engine
    scheduler, drafter = engine.scheduler, llm.drafter
    found: list[tuple[object, str, str]] = [
        (engine, "step", STEP),
        (engine.target, "forward", "target"),
        (steps, "collect_output", "sampling and verification"),
        (scheduler, "schedule", "scheduling"),
        (scheduler, "commit", "commit"),
        (scheduler, "finish", "ends"),
        (engine, "_build_forward_batch", "window"),
        (engine, "_append_tokens", "text"),
        (engine, "_emit_deltas", "deltas"),
        (steps, "compact_accepted", "moving KV"),
        (steps, "_prepend_chunks", "prompt chunks"),
        (engine.length_policy, "allocate", "controller"),
        (engine.length_policy, "record_step", "controller"),
        (engine.drafter, "propose", "sandbox of the drafter"),
        (engine.drafter, "observe", "sandbox of the drafter"),
    ]
    if drafter is not None:
        found += [(drafter, verb, "drafter") for verb in ("propose", "observe", "forget")]
    prefix = getattr(scheduler, "prefix_cache", None)
    if prefix is not None:
        found += [(prefix, verb, "prefix cache") for verb in ("match", "apply_hit", "insert", "release")]
    return found


@dataclass
class ModeTimings:
    """One mode, all rounds."""

    rounds: list[PartTimer] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)  # share of the loop's time that no step took

    def compute_milliseconds(self, part: str) -> float:
        return 1000 * statistics.median(parts.seconds.get(part, 0.0) / parts.num_steps for parts in self.rounds)

    def compute_share(self, names: Sequence[str]) -> float:
        """Median over the rounds of the share of the step."""
        return statistics.median(
            sum(parts.seconds.get(name, 0.0) for name in names) / sum(parts.seconds.values()) for parts in self.rounds
        )

    @property
    def step(self) -> float:
        return 1000 * statistics.median(sum(parts.seconds.values()) / parts.num_steps for parts in self.rounds)


def measure_round(driver: EngineDriver, work: LoadWorkload, streams: int, number: int, seen: ModeTimings) -> None:
    parts = PartTimer(driver.clock)
    with parts.instrument(driver.llm):
        loop: ClosedLoopResult = driver.run(work.make_requests(streams, number), streams)
    seen.rounds.append(parts)
    seen.outside.append(1 - sum(parts.seconds.values()) / loop.seconds)


def format_table(found: dict[str, ModeTimings]) -> str:
    names = sorted({name for seen in found.values() for parts in seen.rounds for name in parts.seconds})
    rest = [name for name in names if name not in WORK]
    rest.sort(key=lambda name: -max(seen.compute_milliseconds(name) for seen in found.values()))
    header = " | ".join(f"{mode}, ms a step | share" for mode in found)
    lines = [f"| part | {header} |", "|---|" + "---:|---:|" * len(found)]
    for name in (*WORK, *rest):
        cells = [f"{seen.compute_milliseconds(name):.3f} | {seen.compute_share([name]):.2%}" for seen in found.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    cells = [f"{seen.step:.3f} | {seen.compute_share(rest):.2%}" for seen in found.values()]
    lines.append("| **step, and bookkeeping's share** | " + " | ".join(cells) + " |")
    cells = [f"  | {statistics.median(seen.outside):.2%}" for seen in found.values()]
    lines.append("| outside the step: requests made, deltas read | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def create_llm(llm: LLM, mode: str, method: str) -> LLM:
    if mode == OFF:
        return llm.with_drafter(None)
    if mode != AUTO:
        return llm.with_drafter(method, int(mode))
    made = llm.with_drafter(method)
    made.calibrate()
    gc.collect()
    gc.freeze()  # as a server does, once its model is loaded
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="off,4,auto", help="off, auto, or a draft length; by commas")
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a smoke test; its figures mean nothing")
    options = parser.parse_args()
    if options.quick:
        options.streams, options.rounds, options.max_tokens, options.prompt_tokens = 8, 1, 8, 16
    llm = LLM(drafter=None, limits=MemoryLimits(max_batch=options.streams))
    texts = [llm.tokenizer(q.turns[0]).input_ids for q in questions.load_questions(None, 96)]
    work = LoadWorkload(tuple(tuple(ids[-options.prompt_tokens :]) for ids in texts), options.max_tokens, 2.0, 1)
    llm.limits = MemoryLimits(max_batch=options.streams, kv_tokens=work.count_kv_tokens(options.streams))
    sampling = Sampling(temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True)
    drivers: dict[str, EngineDriver] = {}
    for mode in options.modes.split(","):
        drivers[mode] = EngineDriver(create_llm(llm, mode, options.method), sampling, CLOCKS[options.clock])
        drivers[mode].run(work.make_requests(options.streams, -1), options.streams)
    found = {mode: ModeTimings() for mode in drivers}
    for number in range(options.rounds):
        for mode in [*drivers][number % len(drivers) :] + [*drivers][: number % len(drivers)]:
            measure_round(drivers[mode], work, options.streams, number, found[mode])
    print(format_table(found))
    rest = {mode: 1 - seen.compute_share(WORK) for mode, seen in found.items()}
    for mode, share in rest.items():
        print(f"{mode}: bookkeeping {share:.2%} of the step" + ("" if share <= ALLOWED else f", above {ALLOWED:.0%}"))
    if options.json:
        rounds = {
            mode: [{"steps": parts.num_steps, "seconds": parts.seconds} for parts in seen.rounds]
            for mode, seen in found.items()
        }
        options.json.write_text(json.dumps({"streams": options.streams, "share": rest, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
