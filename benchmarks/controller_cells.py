"""One table of the adaptive draft length against plain decoding and the best fixed length, over all cells.

    python benchmarks/controller_cells.py --out FOLDER [--methods draft_model,eagle3] [--temperatures 0,1]
                                          [--streams 1,2,4,8,16,32,64] [--short | --quick] [--table]

A cell is a method, a temperature and a number of streams. It is one run of `foredraft bench load`, which measures an
engine without a drafter, the adaptive length and fixed lengths in turn for the same requests. Its JSON file stays in
FOLDER. A cell whose file exists is not measured again, so an interrupted run goes on where it stopped. --table measures
nothing and prints the table of the files. No other program should run on the machine.

The goals are those of docs/controller.md: auto / plain of at least 0.97 in every cell, and auto / best of at least 0.95
up to 4 streams. Plain decoding has no drafter, so nothing is observed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METHODS = "draft_model,eagle3,eagle,medusa,ngram,suffix,early_exit"
FULL = "--minutes 3 --prompts 96 --prompt-tokens 64 --max-tokens 96 --least 8 --waves 3 --rounds 7 --fixed 1,2,4,8"
SHORT = "--minutes 0.3 --prompts 48 --prompt-tokens 64 --max-tokens 48 --least 4 --waves 2 --rounds 3 --fixed 1,2,4,8"
QUICK = "--minutes 0.3 --prompts 8 --prompt-tokens 16 --max-tokens 24 --least 2 --waves 1 --rounds 2 --fixed 2,4"
MIN_OVER_PLAIN, MIN_OVER_BEST, FEW_STREAMS = 0.97, 0.95, 4


@dataclass(frozen=True)
class ControllerCell:
    """One method at one temperature with one number of streams."""

    method: str
    temperature: str
    streams: int

    def find_file(self, folder: Path) -> Path:
        """Return the path of the cell's figures."""
        return folder / f"{self.method}-t{self.temperature}-{self.streams}.json"


def list_cells(options: argparse.Namespace) -> Iterator[ControllerCell]:
    """Yield all cells, those with few streams first."""
    for streams in map(int, options.streams.split(",")):
        for method in options.methods.split(","):
            for temperature in options.temperatures.split(","):
                yield ControllerCell(method, temperature, streams)


def measure_cell(cell: ControllerCell, options: argparse.Namespace) -> None:
    """Measure one cell. Its file appears only when the measurement is complete."""
    target = cell.find_file(options.out)
    partial = target.with_suffix(".partial")
    size = QUICK if options.quick else SHORT if options.short else FULL
    arguments = [*size.split(), "--json", str(partial), "--more", ""]
    arguments += ["--method", cell.method, "--temperature", cell.temperature, "--concurrency", str(cell.streams)]
    if options.model is not None:
        arguments += ["--model", options.model]
    if options.threads is not None:
        arguments += ["--threads", str(options.threads)]
    print(f"foredraft bench load {' '.join(arguments)}", file=sys.stderr, flush=True)
    partial.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-m", "foredraft", "bench", "load", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    partial.rename(target)


def format_table(cells: list[ControllerCell], folder: Path) -> list[str]:
    """Format one row per measured cell; * marks a figure below its goal."""
    lines = [
        "| method | T | streams | plain, tokens/s | auto / plain | best K | best K / plain | auto / best K |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for cell in cells:
        file = cell.find_file(folder)
        if not file.exists():
            continue
        [point] = json.loads(file.read_text(encoding="utf-8"))["points"]
        by_mode: dict[str, Any] = {entry["mode"]: entry for entry in point["cells"]}
        best, over_best = point["best_fixed"], point["auto_over_best"]
        goal = MIN_OVER_BEST if cell.streams <= FEW_STREAMS else 0.0
        lines.append(
            f"| {cell.method} | {cell.temperature} | {cell.streams} | {by_mode['off']['tokens_per_second']:.1f} "
            f"| {format_ratio(by_mode['auto']['over_off'], MIN_OVER_PLAIN)} | {best} "
            f"| {by_mode[best]['over_off']:.2f}x | {format_ratio(over_best, goal)} |"
        )
    return lines


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
    parser.add_argument("--threads", type=int)
    parser.add_argument("--short", action="store_true", help="about 20 seconds per cell instead of 3 minutes")
    parser.add_argument("--quick", action="store_true", help="a few seconds per cell, to try the script")
    parser.add_argument("--table", action="store_true", help="print the table of the files in --out alone")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cells = list(list_cells(options))
    for cell in cells:
        if not options.table and not cell.find_file(options.out).exists():
            measure_cell(cell, options)
    print("\n".join(format_table(cells, options.out)))


if __name__ == "__main__":
    main()
