"""One table of the adaptive draft length against plain decoding and the best fixed length, over all cells.

    python benchmarks/controller_cells.py --out FOLDER [--methods draft_model,eagle3] [--temperatures 0,1]
                                          [--streams 1,2,4,8,16,32,64] [--model MODEL --spec-model DRAFT]
                                          [--short | --pairs | --quick] [--minutes MINUTES] [--table]

A cell is a method, a temperature and a number of streams. The cells of a method and a temperature are one run of
`foredraft bench load`, which measures an engine without a drafter, the adaptive length and fixed lengths in turn for
the same requests. Its engines serve all numbers of streams, one after the other, as a server's engine does. Its JSON
file stays in FOLDER. A run whose file exists is not repeated, so an interrupted table goes on where it stopped. --table
measures nothing and prints the table of the files. No other program should run on the machine.

--pairs measures plain decoding and the adaptive length alone, so that a cell of 10 seconds has more rounds, and prints
the quartiles of auto / plain over them. --minutes sets another time per cell. In a cell of seconds the start of an
engine and of a load, in which lengths are not known yet, is a larger part of the time.

The goals are those of docs/controller.md: auto / plain of at least 0.97 in every cell, and auto / best of at least 0.95
up to 4 streams. Plain decoding has no drafter, so nothing is observed.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = "draft_model,eagle3,eagle,medusa,ngram,suffix,early_exit"


@dataclass(frozen=True)
class RunSize:
    """Size of one run of `foredraft bench load`."""

    minutes: float  # for each number of streams, start of the engines included
    arguments: str


FULL = RunSize(3.0, "--prompts 96 --prompt-tokens 64 --max-tokens 96 --least 8 --waves 3 --rounds 21 --fixed 1,2,4,8")
SHORT = RunSize(0.25, "--prompts 48 --prompt-tokens 64 --max-tokens 48 --least 8 --waves 2 --rounds 9 --fixed 1,2,4,8")
PAIRS = RunSize(1 / 6, "--prompts 48 --prompt-tokens 64 --max-tokens 48 --least 8 --waves 2 --rounds 60")
QUICK = RunSize(0.1, "--prompts 8 --prompt-tokens 16 --max-tokens 24 --least 2 --waves 1 --rounds 2 --fixed 2,4")
MIN_OVER_PLAIN, MIN_OVER_BEST, FEW_STREAMS = 0.97, 0.95, 4


@dataclass(frozen=True)
class ControllerRun:
    """One method at one temperature, with all numbers of streams."""

    method: str
    temperature: str

    def find_file(self, folder: Path) -> Path:
        """Return the path of the run's figures."""
        return folder / f"{self.method}-t{self.temperature}.json"


def list_runs(options: argparse.Namespace) -> Iterator[ControllerRun]:
    """Yield the runs in the order of the table."""
    for method in options.methods.split(","):
        for temperature in options.temperatures.split(","):
            yield ControllerRun(method, temperature)


def measure_run(run: ControllerRun, options: argparse.Namespace) -> None:
    """Measure the cells of one run. Its file appears only when the measurement is complete."""
    target = run.find_file(options.out)
    partial = target.with_suffix(".partial")
    size = QUICK if options.quick else PAIRS if options.pairs else SHORT if options.short else FULL
    minutes = (options.minutes or size.minutes) * len(options.streams.split(","))
    arguments = [*size.arguments.split(), "--minutes", f"{minutes:.2f}", "--json", str(partial), "--more", ""]
    arguments += ["--fixed", ""] if options.pairs else []
    arguments += ["--method", run.method, "--temperature", run.temperature, "--concurrency", options.streams]
    if options.model is not None:
        arguments += ["--model", options.model]
    if options.spec_model is not None and run.method == "draft_model":
        arguments += ["--spec-model", options.spec_model]
    if options.threads is not None:
        arguments += ["--threads", str(options.threads)]
    print(f"foredraft bench load {' '.join(arguments)}", file=sys.stderr, flush=True)
    partial.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-m", "foredraft", "bench", "load", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    partial.rename(target)


def format_table(runs: list[ControllerRun], folder: Path) -> list[str]:
    """Format one row per measured cell; * marks a figure below its goal."""
    points = [(run, point) for run in runs for point in read_points(run.find_file(folder))]
    more = ["best K", "best K / plain", "auto / best K"] if has_fixed(points) else ["quartiles", "rounds"]
    columns = ["plain, tokens/s", "auto / plain", *more]
    header = f"| method | T | streams | {' | '.join(columns)} |"
    return [header, "|---" + "|---:" * (2 + len(columns)) + "|", *(format_cell(run, point) for run, point in points)]


def read_points(file: Path) -> list[dict[str, Any]]:
    """Return the measured numbers of streams of a run; none if its file does not exist."""
    return list(json.loads(file.read_text(encoding="utf-8"))["points"]) if file.exists() else []


def has_fixed(points: list[tuple[ControllerRun, dict[str, Any]]]) -> bool:
    """Return whether fixed lengths were measured too."""
    return any(point["best_fixed"] is not None for _, point in points)


def format_cell(run: ControllerRun, point: dict[str, Any]) -> str:
    """Format the row of one cell."""
    by_mode: dict[str, Any] = {entry["mode"]: entry for entry in point["cells"]}
    best, over_best, streams = point["best_fixed"], point["auto_over_best"], point["concurrency"]
    goal = MIN_OVER_BEST if streams <= FEW_STREAMS else 0.0
    start = (
        f"| {run.method} | {run.temperature} | {streams} | {by_mode['off']['tokens_per_second']:.1f} "
        f"| {format_ratio(by_mode['auto']['over_off'], MIN_OVER_PLAIN)} |"
    )
    if best is None:
        rounds = by_mode["auto"]["over_off_rounds"]
        low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
        return f"{start} {low:.2f} to {high:.2f}x | {len(rounds)} |"
    return f"{start} {best} | {by_mode[best]['over_off']:.2f}x | {format_ratio(over_best, goal)} |"


def format_ratio(ratio: float, goal: float) -> str:
    """Format a ratio; * if it is below the goal."""
    return f"{ratio:.2f}x" + ("*" if ratio < goal else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells' files")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--streams", default="1,2,4,8,16,32,64")
    parser.add_argument("--model", help="target; default: the built-in one")
    parser.add_argument("--spec-model", help="draft model of draft_model; default: the built-in one")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--short", action="store_true", help="15 seconds per cell instead of 3 minutes")
    parser.add_argument("--pairs", action="store_true", help="10 seconds per cell, without fixed lengths")
    parser.add_argument("--quick", action="store_true", help="a few seconds per cell, to try the script")
    parser.add_argument("--minutes", type=float, help="minutes per cell; default: 3, or those of the options above")
    parser.add_argument("--table", action="store_true", help="print the table of the files in --out alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = list(list_runs(options))
    for run in runs:
        if not options.table and not run.find_file(options.out).exists():
            measure_run(run, options)
    print("\n".join(format_table(runs, options.out)))


if __name__ == "__main__":
    main()
