"""Speed of two source folders, measured in turns: the cost of a step, and the time of outputs of the built-in pair.

    python benchmarks/compare_checkouts.py OLD/src NEW/src [--rounds 40] [--steps 40] [--batches 1,16] [--drafts 0,4]
        [--proposals draft_model:2,eagle:3,draft_model:2:int8 [--temperature 1]]
        [--prompts 1x512,16x64 [--model FOLDER] [--threads 1]]

Each folder runs in a process of its own. The two processes take turns, one short slice at a time, so that both see the
same state of the machine. A slice yields the lower quartile of the processor time of its steps, or that of the
proposals of a built-in drafter (`--proposals`), or the processor time of one generated output, or the time of the first
tokens of some prompts of equal length (`--prompts`, which may use more threads). The table has, per row,
both times and the median and quartiles over the rounds of the ratio new / old. Its last line has the median of the
medians of the rows with steps. With `--prompts`, the limits of the first passes follow, at the machine's speeds before
and after the slices.

This script and `step_overhead.py` belong to one checkout. From both folders they use only names that both have.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent
VOCAB_SIZE = 4096
PAIR_TOKENS = 48  # tokens of one output of the built-in pair
PAIR_MODES = {"pair, plain": (None, 0), "pair, draft_model:2": ("draft_model", 2)}
WARM_UP_SLICES = 3


def parse_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


# -- the process of one source folder


def create_step_slices(args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Return one function per row, which runs a slice of steps and returns the lower quartile of their seconds."""
    import torch

    import step_overhead

    tokenizer = step_overhead.load_tokenizer(str(step_overhead.zoo.find_folder("target")))
    lm = step_overhead.StubLM.from_vocab_size(VOCAB_SIZE, torch.bfloat16)

    def create_slice(mode: str, num_requests: int, num_drafts: int) -> Callable[[], float]:
        engine = step_overhead.create_engine(lm, num_requests, num_drafts, mode, tokenizer)
        for _ in range(step_overhead.WARM_UP_STEPS):
            engine.step()

        def run() -> float:
            seconds = []
            for _ in range(args.steps):
                start = time.thread_time()
                engine.step()
                seconds.append(time.thread_time() - start)
                step_overhead.clear_deltas(engine)
            return statistics.quantiles(seconds, n=4)[0]

        return run

    rows = itertools.product(args.modes, args.batches, args.drafts)
    return {f"{mode}, B {b}, K {k}": create_slice(mode, b, k) for mode, b, k in rows}


def create_pair_slices() -> dict[str, Callable[[], float]]:
    """Return one function per drafter of the built-in pair, which generates one output and returns its seconds."""
    from foredraft import LLM, Sampling

    llm = LLM(drafter=None)

    def create_slice(drafter: str | None, num_tokens: int) -> Callable[[], float]:
        one = llm.with_drafter(drafter, num_tokens) if drafter else llm
        sampling = Sampling(temperature=0.0, max_tokens=PAIR_TOKENS, ignore_eos=True)

        def run() -> float:
            start = time.process_time()
            one.generate("Once upon a time there was", sampling)
            return time.process_time() - start

        return run

    return {label: create_slice(drafter, num_tokens) for label, (drafter, num_tokens) in PAIR_MODES.items()}


def create_proposal_slices(specs: list[str], temperature: float) -> dict[str, Callable[[], float]]:
    """Return one function per drafter and batch, which returns the lower quartile of the seconds of its proposals."""
    from foredraft import LLM, Sampling

    llm = LLM(drafter=None)

    def create_slice(method: str, num_tokens: int, num_prompts: int, *weights: str) -> Callable[[], float]:
        spec = {"method": method, "quantization": weights[0]} if weights else method
        one = llm.with_drafter(spec, num_tokens)
        sampling = Sampling(temperature=temperature, max_tokens=PAIR_TOKENS, ignore_eos=True)
        seconds: list[float] = []
        propose = one.drafter.propose

        def time_proposal(batch: object) -> object:
            start = time.thread_time()
            tree = propose(batch)
            seconds.append(time.thread_time() - start)
            return tree

        one.drafter.propose = time_proposal

        def run() -> float:
            seconds.clear()
            one.generate(["Once upon a time there was"] * num_prompts, sampling)
            return statistics.quantiles(seconds, n=4)[0]

        return run

    parts = {spec: spec.split(":") for spec in specs}
    return {
        f"propose, {spec}, B {b}": create_slice(method, int(length), b, *weights)
        for (spec, (method, length, *weights)), b in itertools.product(parts.items(), (1, 4))
    }


def create_prompt_slices(shapes: list[str], model: str | None) -> dict[str, Callable[[], float]]:
    """Return one function per shape, such as 16x64 for 16 prompts of 64 tokens, which returns seconds."""
    from foredraft import LLM, Sampling

    llm = LLM(model, drafter=None)
    rng = random.Random(0)

    def create_slice(num_prompts: int, length: int) -> Callable[[], float]:
        def run() -> float:
            prompts = [[rng.randrange(5, VOCAB_SIZE) for _ in range(length)] for _ in range(num_prompts)]
            start = time.perf_counter()
            llm.generate(prompts, Sampling(temperature=0.0, max_tokens=1))
            return time.perf_counter() - start

        return run

    return {f"prompts, {shape}": create_slice(*map(int, shape.split("x"))) for shape in shapes}


def create_slices(args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Return the slices that the options ask for, by row."""
    if args.prompts:
        return create_prompt_slices(args.prompts, args.model)
    if args.proposals:
        return create_proposal_slices(args.proposals, args.temperature)
    return create_step_slices(args) | ({} if args.no_pair else create_pair_slices())


def serve(args: argparse.Namespace) -> None:
    """Print the labels of all rows, then run a slice for every label on standard input and print its seconds."""
    import torch

    torch.set_num_threads(args.threads)
    slices = create_slices(args)
    print(json.dumps(list(slices)), flush=True)
    for line in sys.stdin:
        print(slices[line.strip()](), flush=True)


# -- the process that compares


class Checkout:
    """Process that runs the slices of one source folder."""

    def __init__(self, folder: str, threads: int) -> None:
        options = {**os.environ, "PYTHONPATH": str(Path(folder).resolve()), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, str(FOLDER / "compare_checkouts.py"), *sys.argv[1:], "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=options, text=True)
        self.labels: list[str] = json.loads(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def run(self, label: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(label + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(old: Checkout, new: Checkout, num_rounds: int) -> None:
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in old.labels}
    for number in range(WARM_UP_SLICES + num_rounds):
        for label in old.labels:
            first, second = (old, new) if number % 2 else (new, old)
            pair = first.run(label), second.run(label)
            if number >= WARM_UP_SLICES:
                times[label].append(pair if first is old else pair[::-1])
    print("| row | old, us | new, us | new / old | quartiles |\n|---|---:|---:|---:|---|")
    medians = []
    for label, pairs in times.items():
        low, middle, high = statistics.quantiles([after / before for before, after in pairs], n=4)
        before, after = (1e6 * statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"| {label} | {before:.1f} | {after:.1f} | {middle:.3f} | {low:.3f} to {high:.3f} |")
        medians += [middle] if label not in PAIR_MODES else []
    print(f"median of the rows with steps: {statistics.median(medians):.3f}")


class PromptLimits:
    """Limits of the passes over prompts of given shapes, for the target that the slices load too."""

    def __init__(self, shapes: list[str], model: str | None) -> None:
        from foredraft import LLM
        from foredraft.bench.pass_limits import LimitsMeter

        self._shapes, self._meter = shapes, LimitsMeter(LLM(model, drafter=None).target)

    def measure(self) -> None:
        """Measure the speeds of the machine."""
        self._meter.measure()

    def print_table(self) -> None:
        limits = self._meter.limits
        assert limits is not None
        print(f"\nlimits at {limits.describe_machine()}\n\n| row | limit |\n|---|---:|")
        for shape in self._shapes:
            num_prompts, length = map(int, shape.split("x"))
            print(f"| prompts, {shape} | {limits.describe(num_prompts * length, logit_rows=num_prompts)} |")


def create_prompt_limits(shapes: list[str], model: str | None, threads: int) -> PromptLimits:
    """Load the target, and measure the machine for the first time."""
    import torch

    torch.set_num_threads(threads)
    limits = PromptLimits(shapes, model)
    limits.measure()
    return limits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=40, help="steps of a slice")
    parser.add_argument("--batches", type=parse_numbers, default=[1, 16])
    parser.add_argument("--drafts", type=parse_numbers, default=[0, 4])
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["greedy", "match", "reject top-p 0.9"])
    parser.add_argument("--proposals", type=lambda text: text.split(","), help="only the proposals of these drafters")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the outputs of --proposals")
    parser.add_argument("--prompts", type=lambda text: text.split(","), help="only the first tokens of such prompts")
    parser.add_argument("--model", help="target of --prompts. Default: the built-in one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-pair", action="store_true", help="only the rows with steps")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    limits = create_prompt_limits(args.prompts, args.model, args.threads) if args.prompts else None
    checkouts = Checkout(args.old, args.threads), Checkout(args.new, args.threads)
    compare(*checkouts, args.rounds)
    for checkout in checkouts:
        checkout.close()
    if limits is not None:
        limits.measure()
        limits.print_table()


if __name__ == "__main__":
    main()
