"""Adaptive draft lengths on simulated engines, and the cost of their decisions on this machine.

    python benchmarks/controller_sim.py [--steps 3000] [--loads 1,4,16] [--predictions] [--start]

With --predictions: speeds with a drafter that predicts the acceptance of its tokens, while that of a text changes.
With --start: speeds of the first steps of an engine.

The speeds are simulated with fixed seeds, so they are equal on all machines; docs/controller.md lists them. The
microseconds are measured.
"""

import argparse
import random
import time

from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.costs import CostCurve
from tests.support.simulated_engine import CURVES, SimulatedEngine, find_best_fixed, make_starting_engine, run


class TimedAdaptive(AdaptiveLengthPolicy):
    """Adaptive policy that measures its own time."""

    seconds = 0.0  # total of all decisions and updates

    def allocate(self, candidates, num_pass_tokens, attended_tokens=0):
        start = time.perf_counter()
        lengths = super().allocate(candidates, num_pass_tokens, attended_tokens)
        self.seconds += time.perf_counter() - start
        return lengths

    def record_step(self, report) -> None:
        start = time.perf_counter()
        super().record_step(report)
        self.seconds += time.perf_counter() - start


# (cost of one level of a draft over a plain step, probability that a draft token is accepted)
CASES = ((0.0, 0.5), (0.2, 0.1), (0.2, 0.8), (1.0, 0.95))


def print_speeds(loads: list[int], steps: int) -> None:
    print("| pass | requests | draft | acceptance | best K | its speed | adaptive | pays | probes |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, curve in CURVES.items():
        for load in loads:
            for draft, acceptance in CASES:
                engine = SimulatedEngine(
                    curve,
                    draft=draft,
                    reading=0.02 * draft,
                    outliers=0.002,
                    accept=lambda step, request, acceptance=acceptance: acceptance,
                    load=lambda step, load=load: load,
                )
                best_length, best_speed = find_best_fixed(engine, steps)
                policy = AdaptiveLengthPolicy(CostCurve(engine.points()))
                totals = run(engine, policy, steps)
                print(
                    f"| {name} | {load} | {draft} | {acceptance} | {best_length} | {best_speed:.2f}x "
                    f"| {totals.speed:.2f}x | {policy.counts['pays'] / steps:.0%} "
                    f"| {policy.counts['probe'] / steps:.1%} |",
                    flush=True,
                )


# Steps after which the acceptance of a request changes, and its two values. 0 = never.
TEXTS = ((0, (0.7, 0.7)), (10, (0.2, 0.9)), (40, (0.2, 0.9)), (40, (0.5, 0.95)), (160, (0.2, 0.9)))
PREDICTIONS = {
    "none": None,
    "exact": lambda rate, noise: rate,
    "noisy": lambda rate, noise: min(max(rate + 0.2 * noise, 0.01), 0.99),
    "unrelated": lambda rate, noise: min(max(0.5 + 0.2 * noise, 0.01), 0.99),
}
SEEDS = 4


def print_predictions(loads: list[int], steps: int) -> None:
    """Print speeds on `stairs` with a draft level of 0.1 passes: means over SEEDS."""
    print(f"| acceptance | changes after | requests | {' | '.join(PREDICTIONS)} |")
    print(f"| --- | ---: | ---: | {' | '.join(['---:'] * len(PREDICTIONS))} |")
    for length, rates in TEXTS:
        for load in loads:
            speeds = [_measure_speed(length, rates, load, name, steps) for name in PREDICTIONS]
            cells = " | ".join(f"{speed:.2f}x" for speed in speeds)
            print(f"| {rates[0]} or {rates[1]} | {length or 'never'} | {load} | {cells} |", flush=True)


def _measure_speed(length: int, rates: tuple[float, float], load: int, prediction: str, steps: int) -> float:
    def accept(step: int, request: int) -> float:
        return random.Random(f"{request} {step // length if length else 0}").choice(rates)

    speeds = []
    for seed in range(SEEDS):
        engine = SimulatedEngine(
            CURVES["stairs"],
            draft=0.1,
            reading=0.002,
            accept=accept,
            load=lambda step: load,
            predict=PREDICTIONS[prediction],
            seed=seed,
        )
        speeds.append(run(engine, AdaptiveLengthPolicy(CostCurve(engine.points())), steps).speed)
    return sum(speeds) / len(speeds)


# Acceptance of the first 12 steps, and of those after them.
STARTS = ((0.2, 0.2), (0.5, 0.5), (0.7, 0.7), (0.9, 0.9), (0.4, 0.9), (0.9, 0.3))
START_STEPS = 40, 80, 200
START_SEEDS = 60


def print_starts() -> None:
    """Print speeds of the first steps: means over START_SEEDS."""
    print(f"| acceptance | after 12 steps | {' | '.join(f'{steps} steps' for steps in START_STEPS)} |")
    print(f"| ---: | ---: | {' | '.join(['---:'] * len(START_STEPS))} |")
    for first, later in STARTS:
        cells = " | ".join(f"{_measure_start(first, later, steps):.2f}x" for steps in START_STEPS)
        print(f"| {first} | {later} | {cells} |", flush=True)


def _measure_start(first: float, later: float, steps: int) -> float:
    def accept(step: int, request: int) -> float:
        return first if step < 12 else later

    engines = [make_starting_engine(seed, accept) for seed in range(START_SEEDS)]
    return sum(run(engine, AdaptiveLengthPolicy(), steps).speed for engine in engines) / START_SEEDS


def print_overhead(steps: int) -> None:
    print("\n| requests | nodes | microseconds a step |")
    print("| ---: | ---: | ---: |")
    for load in (1, 4, 16, 64):
        engine = SimulatedEngine(draft=0.02, load=lambda step, load=load: load)
        policy = TimedAdaptive(CostCurve(engine.points()))
        run(engine, policy, steps)
        print(f"| {load} | {policy.decision.nodes} | {1e6 * policy.seconds / steps:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--loads", default="1,4,16")
    parser.add_argument("--predictions", action="store_true")
    parser.add_argument("--start", action="store_true")
    args = parser.parse_args()
    if args.start:
        print_starts()
        return
    if args.predictions:
        print_predictions([int(load) for load in args.loads.split(",")], args.steps)
        return
    print_speeds([int(load) for load in args.loads.split(",")], args.steps)
    print_overhead(min(args.steps, 1000))


if __name__ == "__main__":
    main()
