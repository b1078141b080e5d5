"""Cost of a step besides models, drafts and sampling, with 64 running requests on the built-in target.

    python benchmarks/bookkeeping.py [--streams 64] [--rounds 3] [--modes off,4,auto] [--json FILE] [--quick]

The load is a closed loop as in serving.py, so it includes admission, prompts, page tables, prefix hashes and the ends
of requests. The time of a part excludes other parts that it calls, so the parts add up to the step. `target`,
`drafter` and `sampling and verification` are the work. The rest is bookkeeping, which should be 5 % of the step at
most. The last lines have the limit of the target's part in the steps of each fixed mode, without prompts.
Reading the clock is included, at about 0.3 microseconds per call. `--clock cpu` counts processor time of the
thread that steps, which other programs do not lengthen; other threads of a pass of the target are then not counted.
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
from foredraft.bench.pass_limits import LimitsMeter
from foredraft.engine import engine as engine_module
from foredraft.llm import MemoryLimits

STEP = "everything else"  # part of a step outside the other parts
WORK = ("target", "drafter", "sampling and verification")  # parts that are not bookkeeping
ALLOWED = 0.05  # maximum share of bookkeeping in a step
NUM_PROMPTS = 96
WAVES = 2.0  # requests per stream and round
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


class PartTimer:
    """Timer of the parts of a step; the seconds of a part exclude the parts it calls."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.num_steps = 0
        self._inner: list[float] = []  # for every open call, the seconds of its inner calls

    def wrap(self, part: str, call: Callable) -> Callable:
        def run(*args, **kwargs):
            self._inner.append(0.0)
            start = self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = self.clock() - start
                self.seconds[part] = self.seconds.get(part, 0.0) + seconds - self._inner.pop()
                if self._inner:
                    self._inner[-1] += seconds
                else:
                    self.num_steps += 1

        return run

    @contextlib.contextmanager
    def instrument(self, llm: LLM) -> Iterator[None]:
        """Wrap the parts of the engine's step with timers, until the context ends."""
        with contextlib.ExitStack() as stack:
            for owner, name, part in list_timed_methods(llm):
                stack.enter_context(replace_attribute(owner, name, self.wrap(part, getattr(owner, name))))
            verify = self.wrap("sampling and verification", engine_module.verify_step)
            stack.enter_context(replace_attribute(engine_module, "verify_step", verify))
            yield


@contextlib.contextmanager
def replace_attribute(owner: object, name: str, replacement: Callable) -> Iterator[None]:
    original = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def list_timed_methods(llm: LLM) -> list[tuple[object, str, str]]:
    """List (owner, method, part). Names must be current: `instrument` raises AttributeError for an unknown method."""
    engine = llm.engine
    scheduler, drafter = engine.scheduler, llm.drafter
    methods: list[tuple[object, str, str]] = [
        (engine, "step", STEP),
        (engine.target, "forward", "target"),
        (engine_module, "collect_output", "sampling and verification"),
        (engine, "_plan", "scheduling"),
        (scheduler, "commit", "commit"),
        (engine.memory, "remove", "ends"),
        (engine_module, "find_prompt_logit_requests", "window"),
        (engine_module, "build_forward_batch", "window"),
        (engine, "_append_tokens", "text"),
        (engine, "_emit_deltas", "deltas"),
        (engine_module, "compact_kv", "moving KV"),
        (engine_module, "prepend_chunks", "prompt chunks"),
        (engine.length_policy, "allocate", "controller"),
        (engine.length_policy, "record_step", "controller"),
        (engine.drafter, "propose", "sandbox of the drafter"),
        (engine.drafter, "observe", "sandbox of the drafter"),
    ]
    if drafter is not None:
        methods += [(drafter, name, "drafter") for name in ("propose", "observe", "forget")]
    prefix = getattr(scheduler, "prefix_cache", None)
    if prefix is not None:
        methods += [(prefix, name, "prefix cache") for name in ("match", "acquire", "insert", "release")]
    return methods


@dataclass
class ModeTimings:
    """Timings of one mode over all rounds."""

    rounds: list[PartTimer] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)  # share of the time of the loop outside steps

    def compute_milliseconds(self, part: str) -> float:
        return 1000 * statistics.median(timer.seconds.get(part, 0.0) / timer.num_steps for timer in self.rounds)

    def compute_share(self, names: Sequence[str]) -> float:
        """Compute the share of some parts in the step, as median over the rounds."""
        return statistics.median(
            sum(timer.seconds.get(name, 0.0) for name in names) / sum(timer.seconds.values()) for timer in self.rounds
        )

    @property
    def step(self) -> float:
        return 1000 * statistics.median(sum(timer.seconds.values()) / timer.num_steps for timer in self.rounds)


def measure_round(
    driver: EngineDriver, workload: LoadWorkload, streams: int, number: int, timings: ModeTimings
) -> None:
    timer = PartTimer(driver.clock)
    with timer.instrument(driver.llm):
        loop: ClosedLoopResult = driver.run(workload.make_requests(streams, number), streams)
    timings.rounds.append(timer)
    timings.outside.append(1 - sum(timer.seconds.values()) / loop.seconds)


def format_table(timings_by_mode: dict[str, ModeTimings]) -> str:
    names = sorted({name for timings in timings_by_mode.values() for timer in timings.rounds for name in timer.seconds})
    rest = [name for name in names if name not in WORK]
    rest.sort(key=lambda name: -max(timings.compute_milliseconds(name) for timings in timings_by_mode.values()))
    header = " | ".join(f"{mode}, ms a step | share" for mode in timings_by_mode)
    lines = [f"| part | {header} |", "|---|" + "---:|---:|" * len(timings_by_mode)]
    for name in (*WORK, *rest):
        cells = [
            f"{timings.compute_milliseconds(name):.3f} | {timings.compute_share([name]):.2%}"
            for timings in timings_by_mode.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    cells = [f"{timings.step:.3f} | {timings.compute_share(rest):.2%}" for timings in timings_by_mode.values()]
    lines.append("| **step, and bookkeeping's share** | " + " | ".join(cells) + " |")
    cells = [f"  | {statistics.median(timings.outside):.2%}" for timings in timings_by_mode.values()]
    lines.append("| outside the step: creating requests, reading deltas | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def create_llm(llm: LLM, mode: str, method: str) -> LLM:
    if mode == OFF:
        return llm.with_drafter(None)
    if mode != AUTO:
        return llm.with_drafter(method, int(mode))
    adaptive = llm.with_drafter(method)
    adaptive.calibrate()
    gc.collect()
    gc.freeze()  # as a server does after it has loaded its model
    return adaptive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="off,4,auto", help="off, auto or a draft length, separated by commas")
    parser.add_argument("--method", default="draft_model")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="smoke test; its figures have no meaning")
    options = parser.parse_args()
    if options.quick:
        options.streams, options.rounds, options.max_tokens, options.prompt_tokens = 8, 1, 8, 16
    llm = LLM(drafter=None, limits=MemoryLimits(max_batch=options.streams))
    prompts = [llm.tokenizer(q.turns[0]).input_ids for q in questions.load_questions(None, NUM_PROMPTS)]
    workload = LoadWorkload(
        tuple(tuple(ids[-options.prompt_tokens :]) for ids in prompts), options.max_tokens, WAVES, 1
    )
    llm.limits = MemoryLimits(max_batch=options.streams, kv_tokens=workload.count_kv_tokens(options.streams))
    sampling = Sampling(temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True)
    drivers: dict[str, EngineDriver] = {}
    for mode in options.modes.split(","):
        drivers[mode] = EngineDriver(create_llm(llm, mode, options.method), sampling, CLOCKS[options.clock])
        drivers[mode].run(workload.make_requests(options.streams, -1), options.streams)
    timings_by_mode, meter = {mode: ModeTimings() for mode in drivers}, LimitsMeter(llm.target)
    for number in range(options.rounds):
        meter.measure()
        for mode in [*drivers][number % len(drivers) :] + [*drivers][: number % len(drivers)]:
            measure_round(drivers[mode], workload, options.streams, number, timings_by_mode[mode])
    print(format_table(timings_by_mode))
    shares = {mode: 1 - timings.compute_share(WORK) for mode, timings in timings_by_mode.items()}
    for mode, share in shares.items():
        print(f"{mode}: bookkeeping {share:.2%} of the step" + ("" if share <= ALLOWED else f", above {ALLOWED:.0%}"))
    if meter.limits is not None:
        print(f"limits of the target at {meter.limits.describe_machine()}:")
        for mode in (mode for mode in drivers if mode != AUTO):
            rows = options.streams * (1 + (0 if mode == OFF else int(mode)))
            print(f"{mode}: {meter.limits.describe(rows)} for {rows} tokens")
    if options.json:
        rounds = {
            mode: [{"steps": timer.num_steps, "seconds": timer.seconds} for timer in timings.rounds]
            for mode, timings in timings_by_mode.items()
        }
        options.json.write_text(json.dumps({"streams": options.streams, "share": shares, "rounds": rounds}, indent=1))


if __name__ == "__main__":
    main()
