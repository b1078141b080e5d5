"""Adaptive draft lengths on simulated engines, and the cost of their decisions on this machine.

    python benchmarks/controller_sim.py [--steps 3000] [--loads 1,4,16]

The speeds are simulated with fixed seeds, so they are equal on all machines; docs/controller.md lists them. The
microseconds are measured.
"""

import argparse
import time

from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.costs import CostCurve
from tests.support.simulated_engine import CURVES, SimulatedEngine, find_best_fixed, run


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
    args = parser.parse_args()
    print_speeds([int(load) for load in args.loads.split(",")], args.steps)
    print_overhead(min(args.steps, 1000))


if __name__ == "__main__":
    main()
