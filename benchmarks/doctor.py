"""Predicted and measured speed-up of `foredraft doctor`, for several models and methods.

    python benchmarks/doctor.py [--models builtin,FOLDER,builtin-seq2seq] [--methods ngram,draft_model,eagle3,medusa]
        [--seconds 60] [--streams 1,4] [--threads 1] [--max-tokens 96]

Each cell is a process of its own: `foredraft doctor --spec-method METHOD --check --json`. The error is the predicted
speed-up over the measured one, minus 1. Prediction and measurement follow each other in one process, so a machine with
other work shows errors that are none of the prediction's. A method that the model has no drafter for is left out.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HEADER = ("model", "method", "streams", "length", "drafts", "predicted", "measured", "error")


def main() -> None:
    """Run all cells, and print the table and the share of cells within 10 %."""
    options = parse_options()
    print("| " + " | ".join(HEADER) + " |")
    print("| --- | --- |" + " ---: |" * (len(HEADER) - 2))
    errors = []
    for model in options.models.split(","):
        for method in options.methods.split(","):
            report = examine(model, method, options)
            if report is None:
                continue
            for drafter in report["drafters"]:
                for one in drafter["streams"]:
                    errors.append(one["error"])
                    cells = (
                        Path(model).name, method, one["streams"], one["best_length"], drafter["acceptance"]["drafts"],
                        f"{one['speed_up']:.2f}x", f"{one['measured_speed_up']:.2f}x", f"{one['error']:+.1%}",
                    )  # fmt: skip
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    within = sum(abs(error) <= 0.1 for error in errors)
    mean = sum(map(abs, errors)) / max(len(errors), 1)
    print(f"\n{within} of {len(errors)} predictions within 10 %; mean absolute error {mean:.1%}")


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="builtin,builtin-seq2seq")
    parser.add_argument("--methods", default="ngram,draft_model,eagle3,medusa")
    parser.add_argument("--seconds", default="60")
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--max-tokens", default="96")
    return parser.parse_args()


def examine(model: str, method: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the report of one cell; None if the method does not run with this model."""
    command = [
        sys.executable, "-m", "foredraft", "doctor", "--model", model, "--spec-method", method, "--check", "--json",
        "--seconds", options.seconds, "--streams", options.streams, "--threads", options.threads,
        "--max-tokens", options.max_tokens,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"{model}, {method}: {done.stderr.strip()}")
    report: dict[str, Any] = json.loads(done.stdout)
    for label, reason in report["unfit"].items():
        print(f"{model}, {label} left out: {reason}", file=sys.stderr)
    return report if report["drafters"] else None


if __name__ == "__main__":
    main()
