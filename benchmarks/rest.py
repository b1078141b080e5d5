"""Cost of a drafter at rest: steps in which no request drafts, against plain decoding.

    python benchmarks/rest.py [--methods eagle3,eagle,hydra,medusa,draft_model,ngram] [--requests 1] [--steps 2000]
                              [--threads 1] [--auto] [--profile METHOD]

The built-in target generates greedily with `num_speculative_tokens=0`; with `--auto`, it samples at temperature 1 and
the controller chooses the lengths, which soon rests if no draft pays. All engines take turns, one step each, so that
they see the same state of the machine. The table has, per method, the median time of a step; of the target's pass; of
what `observe` takes, with the preparation of its input; and the median over the steps of the time of a step over that
of plain decoding in the same turn, less 1. Times are processor time of the thread, in microseconds. The last
line has the limit of the target's pass.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

import torch

from foredraft import LLM, RequestOptions, Sampling
from foredraft.bench.pass_limits import LimitsMeter

PLAIN = "plain"
PROMPT_TOKENS = 64
WARM_UP_STEPS = 20
OUTPUT_TOKENS = 256  # of a request; the next one takes its place
TOP_FUNCTIONS = 25  # lines of a profile


class RestingEngine:
    """Engine whose requests never draft, with the times of its steps and their parts in seconds."""

    def __init__(self, method: str, num_requests: int, is_auto: bool = False) -> None:
        self.is_auto = is_auto
        self.llm = LLM(drafter=None if method == PLAIN else method)
        self.num_requests, self.num_started = num_requests, 0
        self.seconds: dict[str, list[float]] = {"step": [], "target": [], "observe": []}
        engine = self.llm.engine
        engine.target.forward = self._time("target", engine.target.forward)  # type: ignore[method-assign]
        engine._observe = self._time("observe", engine._observe)  # type: ignore[method-assign]
        self._step = self._time("step", engine.step)

    def _time(self, part: str, call: Callable) -> Callable:
        def run(*args, **kwargs):
            start = time.thread_time()
            result = call(*args, **kwargs)
            self.seconds[part].append(time.thread_time() - start)
            return result

        return run

    def step(self) -> None:
        engine = self.llm.engine
        while len(engine.transcripts) < self.num_requests:
            prompt = [5 + (self.num_started + i) % 1000 for i in range(PROMPT_TOKENS)]
            sampling = Sampling(temperature=float(self.is_auto), max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            options = RequestOptions() if self.is_auto else RequestOptions(num_speculative_tokens=0)
            (transcript,) = self.llm._requests.prepare(prompt, sampling, options, self.num_started)
            engine.add(transcript)
            self.num_started += 1
        self._step()
        for transcript in engine.transcripts.values():
            transcript.deltas.clear()


def format_row(method: str, engine: RestingEngine, plain: RestingEngine) -> str:
    medians = [1e6 * statistics.median(engine.seconds[part]) for part in ("step", "target", "observe")]
    pairs = zip(engine.seconds["step"], plain.seconds["step"], strict=True)
    cost = statistics.median(a / b for a, b in pairs) - 1
    return f"| {method} | " + " | ".join(f"{us:.1f}" for us in medians) + f" | {cost:+.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="eagle3,eagle,hydra,medusa,draft_model,ngram")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--profile", metavar="METHOD")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.profile:
        engine = RestingEngine(args.profile, args.requests, args.auto)
        with cProfile.Profile() as profiler:
            for _ in range(args.steps):
                engine.step()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(TOP_FUNCTIONS)
        return
    engines = {method: RestingEngine(method, args.requests, args.auto) for method in [PLAIN, *args.methods.split(",")]}
    meter = LimitsMeter(engines[PLAIN].llm.target)
    meter.measure()
    for number in range(WARM_UP_STEPS + args.steps):
        for engine in engines.values():
            engine.step()
            if number < WARM_UP_STEPS:
                for times in engine.seconds.values():
                    times.clear()
    print("| method | step | target | observe | over plain |\n|---|---:|---:|---:|---:|")
    for method, engine in engines.items():
        print(format_row(method, engine, engines[PLAIN]))
    meter.measure()
    if meter.limits is not None:
        print(f"limit of the pass: {meter.limits.describe(args.requests)} at {meter.limits.describe_machine()}")


if __name__ == "__main__":
    main()
