"""KV after 2,000 random accept, reject and abort steps, compared with a from-scratch forward pass after every one.

    python benchmarks/kv_equality.py [--steps 2000]

Prints the largest absolute difference over all layers, keys and values, of target and draft, in float64.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from invariants.test_kv import CASES
from kv_comparison import simulate_draft_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each kind of draft")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    worst = 0.0
    for name, (branching, num_tokens, verify) in CASES.items():
        began = time.perf_counter()
        tally = simulate_draft_model(steps, branching, num_tokens, verify, seed=2)
        worst = max(worst, tally.difference)
        print(
            f"{name:14} {tally.steps} steps: largest difference {tally.difference:.2e}; {tally.accepted} drafted "
            f"tokens accepted, {tally.rejected} rejected, {tally.aborted} requests aborted, "
            f"{tally.preempted} preempted, {tally.finished} finished ({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    print(f"largest difference of all: {worst:.2e} (to hold: <= 1e-12)")
    sys.exit(worst > 1e-12)


if __name__ == "__main__":
    main()
