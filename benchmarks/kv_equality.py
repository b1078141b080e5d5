"""Comparison of the KV cache with a forward pass from scratch, after each of 2,000 random steps.

    python benchmarks/kv_equality.py [--steps 2000]

The steps accept, reject and abort at random. The script prints the largest absolute difference over all layers, of keys
and values of target and draft model, in float64.
"""

import argparse
import sys
import time

import torch

from tests.invariants.test_kv import CASES
from tests.support.kv_comparison import simulate_draft_model

TOLERANCE = 1e-12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps per kind of draft")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    max_difference = 0.0
    for name, (branching, num_tokens, verify) in CASES.items():
        start = time.perf_counter()
        tally = simulate_draft_model(steps, branching, num_tokens, verify, seed=2)
        max_difference = max(max_difference, tally.difference)
        print(
            f"{name:14} {tally.steps} steps: largest difference {tally.difference:.2e}; {tally.accepted} drafted "
            f"tokens accepted, {tally.rejected} rejected, {tally.aborted} requests aborted, "
            f"{tally.preempted} preempted, {tally.finished} finished ({time.perf_counter() - start:.0f} s)",
            flush=True,
        )
    print(f"largest difference of all: {max_difference:.2e} (allowed: {TOLERANCE:.0e})")
    sys.exit(max_difference > TOLERANCE)


if __name__ == "__main__":
    main()
