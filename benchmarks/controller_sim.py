"""Adaptive draft lengths on simulated engines, and the cost of deciding on this machine.

    python benchmarks/controller_sim.py [--steps 3000] [--loads 1,4,16]

The speeds are simulated, seeded and the same everywhere; docs/controller.md shows them. The microseconds are measured.
"""

import argparse
import sys
import time
from pathlib import Path

from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.costs import CostCurve

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from simulated_engine import CURVES, SimulatedEngine, find_best_fixed, run


class TimedAdaptive(AdaptiveLengthPolicy):
    seconds = 0.0

    def allocate(self, candidates, num_rows, attended_tokens=0):
        start = time.perf_counter()
        found = super().allocate(candidates, num_rows, attended_tokens)
        self.seconds += time.perf_counter() - start
        return found

    def record_step(self, report) -> None:
        start = time.perf_counter()
        super().record_step(report)
        self.seconds += time.perf_counter() - start


def print_speeds(loads: list[int], steps: int) -> None:
    print("| pass | requests | draft | acceptance | best K | its speed | adaptive | pays | probes |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, curve in CURVES.items():
        for load in loads:
            for draft, chance in ((0.0, 0.5), (0.2, 0.1), (0.2, 0.8), (1.0, 0.95)):
                world = SimulatedEngine(
                    curve,
                    draft=draft,
                    reading=0.02 * draft,
                    outliers=0.002,
                    accept=lambda step, request, chance=chance: chance,
                    load=lambda step, load=load: load,
                )
                nodes, best = find_best_fixed(world, steps)
                lengths = AdaptiveLengthPolicy(CostCurve(world.points()))
                totals = run(world, lengths, steps)
                print(
                    f"| {name} | {load} | {draft} | {chance} | {nodes} | {best:.2f}x | {totals.speed:.2f}x "
                    f"| {lengths.counts['pays'] / steps:.0%} | {lengths.counts['probe'] / steps:.1%} |",
                    flush=True,
                )


def print_overhead(steps: int) -> None:
    print("\n| requests | nodes | microseconds a step |")
    print("| ---: | ---: | ---: |")
    for load in (1, 4, 16, 64):
        world = SimulatedEngine(draft=0.02, load=lambda step, load=load: load)
        lengths = TimedAdaptive(CostCurve(world.points()))
        run(world, lengths, steps)
        print(f"| {load} | {lengths.decision.nodes} | {1e6 * lengths.seconds / steps:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--loads", default="1,4,16")
    args = parser.parse_args()
    print_speeds([int(load) for load in args.loads.split(",")], args.steps)
    print_overhead(min(args.steps, 1000))


if __name__ == "__main__":
    main()
