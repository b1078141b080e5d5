"""Table of the held-out loss of a built-in model by training tokens.

    python benchmarks/training_curve.py [LOG] [--every 5000000]

LOG is `log.jsonl` of a model that `foredraft zoo train` made; default: that of the built-in target.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from foredraft import zoo

DECAY, CYCLE = "decay_from", "cycle"  # keys that the entries of these stages have


def read_evaluations(log: Path) -> list[dict[str, Any]]:
    """Return the entries of a log that have a held-out loss."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [entry for entry in entries if "held_loss" in entry]


def select_rows(evaluations: list[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """Return the first entry of every interval of tokens, and the last entry of every stage."""
    rows: list[dict[str, Any]] = []
    for entry, following in zip(evaluations, [*evaluations[1:], None], strict=True):
        is_new = not rows or entry["tokens"] // every > rows[-1]["tokens"] // every
        if is_new or following is None or name_stage(following) != name_stage(entry):
            rows.append(entry)
    return rows


def name_stage(entry: dict[str, Any]) -> str:
    """Return the stage of the schedule that an entry belongs to."""
    if CYCLE in entry:
        return "further cycle"
    return "decay" if DECAY in entry else f"constant rate, {entry['layers']} layers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", nargs="?", type=Path, default=zoo.find_target_folder(zoo.DEFAULT_TARGET) / "log.jsonl")
    parser.add_argument("--every", type=int, default=5_000_000, help="tokens between two rows")
    options = parser.parse_args()
    print("| tokens, millions | stage | held-out loss, nats |\n|---:|---|---:|")
    for entry in select_rows(read_evaluations(options.log), options.every):
        print(f"| {entry['tokens'] / 1e6:.1f} | {name_stage(entry)} | {entry['held_loss']:.3f} |")


if __name__ == "__main__":
    main()
