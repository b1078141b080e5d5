"""One table of the adaptive draft length against plain decoding and the best fixed length, over all cells.

    python benchmarks/controller_cells.py --out FOLDER [--methods draft_model,eagle3] [--temperatures 0,1]
                                          [--streams 1,2,4,8,16,32,64] [--model MODEL --spec-model DRAFT]
                                          [--short | --pairs | --quick] [--minutes MINUTES] [--table]

A cell is a method, a temperature and a number of streams. The cells of a method and a temperature are one run of
`foredraft bench load`, which measures an engine without a drafter, the adaptive length and fixed lengths in turn for
the same requests. Its engines serve all numbers of streams, one after the other, as a server's engine does. Its JSON
file stays in FOLDER. A run whose file exists is not repeated, so an interrupted table goes on where it stopped. --table
measures nothing and prints the table of the files. No other program should run on the machine.

--pairs measures plain decoding and the adaptive length alone, for more methods, so that a cell of 10 seconds has more
rounds. Its table has a row per method and temperature, with the quartiles of auto / plain over rounds in parentheses. A
summary follows. --minutes sets another time per cell. In a cell of seconds the start of an
engine and of a load, in which lengths are not known yet, is a larger part of the time.

The goals are those of docs/controller.md: auto / plain of at least 0.97 in every cell, and auto / best of at least 0.95
up to 4 streams. Plain decoding has no drafter, so nothing is observed.

The best of several fixed lengths is favoured by noise if it is chosen from the rounds that it is compared in. A second
column, "unbiased", therefore compares every round with the length that was best in the rounds of the other parity.
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
MORE_METHODS = "hydra,mlp_speculator,blockwise,chimera,dflash,aggressive,lookahead,token_recycling"  # of --pairs


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
    methods = options.methods or (f"{METHODS},{MORE_METHODS}" if options.pairs else METHODS)
    for method in methods.split(","):
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
    """Format one row per measured cell, and a summary; * marks a figure below its goal."""
    points = [(run, point) for run in runs for point in read_points(run.find_file(folder))]
    columns = ["plain, tokens/s", "auto / plain", "best K", "best K / plain", "auto / best K", "unbiased", "rounds"]
    rows = [format_cell(run, point) for run, point in points]
    return [*format_header(["method", "T", "streams", *columns]), *rows, "", *summarize_best(points)]


def summarize_best(points: list[tuple[ControllerRun, dict[str, Any]]]) -> list[str]:
    """Format auto / best K at few streams, two rows per temperature."""
    lines = format_header(["T", "auto / best K", "cells", f"below {MIN_OVER_BEST}", "lowest", "mean"])
    few = [(run.temperature, p) for run, p in points if p["concurrency"] <= FEW_STREAMS]
    for temperature in sorted({temperature for temperature, _ in few}):
        own = [p for found, p in few if found == temperature]
        unbiased = [ratio for ratio in map(compute_unbiased_ratio, own) if ratio is not None]
        for name, ratios in (("as measured", [p["auto_over_best"] for p in own]), ("unbiased", unbiased)):
            if ratios:
                lines.append(format_row([temperature, name, *list_best_statistics(ratios)]))
    return lines


def list_best_statistics(ratios: list[float]) -> list[str]:
    """Format the columns of auto / best K in the summary."""
    misses = sum(ratio < MIN_OVER_BEST for ratio in ratios)
    return [str(len(ratios)), str(misses), f"{min(ratios):.2f}x", f"{statistics.mean(ratios):.3f}x"]


def compute_unbiased_ratio(point: dict[str, Any]) -> float | None:
    """Return the median of auto over the fixed length best in rounds of the other parity; None for one round."""
    by_mode: dict[str, list[float]] = {entry["mode"]: entry["over_off_rounds"] for entry in point["cells"]}
    auto = by_mode["auto"]
    fixed = {mode: rounds for mode, rounds in by_mode.items() if mode not in ("off", "auto")}
    if len(auto) < 2:
        return None
    best = [max(fixed, key=lambda mode: statistics.median(fixed[mode][1 - parity :: 2])) for parity in (0, 1)]
    return statistics.median(ratio / fixed[best[i % 2]][i] for i, ratio in enumerate(auto))


@dataclass(frozen=True)
class Pair:
    """The adaptive length beside plain decoding in one cell."""

    run: ControllerRun
    streams: int
    plain_rate: float  # tokens per second
    ratio: float  # auto / plain, median over rounds
    rounds: list[float]  # auto / plain

    @classmethod
    def from_point(cls, run: ControllerRun, point: dict[str, Any]) -> "Pair":
        """Read a measured number of streams of a run."""
        modes: dict[str, Any] = {entry["mode"]: entry for entry in point["cells"]}
        auto = modes["auto"]
        rate = modes["off"]["tokens_per_second"]
        return cls(run, point["concurrency"], rate, auto["over_off"], auto["over_off_rounds"])

    def __str__(self) -> str:
        quartiles = statistics.quantiles(self.rounds, n=4, method="inclusive") if len(self.rounds) > 1 else self.rounds
        return f"{format_ratio(self.ratio, MIN_OVER_PLAIN)} ({quartiles[0]:.2f} to {quartiles[-1]:.2f})"


def format_pairs(runs: list[ControllerRun], folder: Path) -> list[str]:
    """Format one row per run, and a summary; * marks a figure below its goal."""
    rows = [[Pair.from_point(run, point) for point in read_points(run.find_file(folder))] for run in runs]
    rows = [row for row in rows if row]
    if not rows:
        return []
    columns = ["method", "T", *(str(pair.streams) for pair in rows[0])]
    lines = format_header(columns)
    lines += [format_row([row[0].run.method, row[0].run.temperature, *map(str, row)]) for row in rows]
    return [*lines, "", *summarize_pairs([pair for row in rows for pair in row])]


def summarize_pairs(pairs: list[Pair]) -> list[str]:
    """Format one row per temperature and size of load."""
    ratios = [f"below {MIN_OVER_PLAIN}", "lowest", "median", "mean"]
    columns = ["T", "streams", "cells", *ratios, "rounds", "plain, tokens/s"]
    lines = format_header(columns)
    for temperature in sorted({pair.run.temperature for pair in pairs}):
        own = [pair for pair in pairs if pair.run.temperature == temperature]
        few = [pair for pair in own if pair.streams <= FEW_STREAMS]
        many = [pair for pair in own if pair.streams > FEW_STREAMS]
        lines += [format_row([temperature, f"up to {FEW_STREAMS}", *list_statistics(few)])] if few else []
        lines += [format_row([temperature, f"more than {FEW_STREAMS}", *list_statistics(many)])] if many else []
    return lines


def list_statistics(pairs: list[Pair]) -> list[str]:
    """Format the columns of a group of cells in the summary."""
    ratios, rounds, rates = [p.ratio for p in pairs], [len(p.rounds) for p in pairs], [p.plain_rate for p in pairs]
    misses = sum(ratio < MIN_OVER_PLAIN for ratio in ratios)
    means = f"{min(ratios):.2f}x", f"{statistics.median(ratios):.2f}x", f"{statistics.mean(ratios):.3f}x"
    ranges = f"{min(rounds)} to {max(rounds)}", f"{min(rates):.0f} to {max(rates):.0f}"
    return [str(len(pairs)), str(misses), *means, *ranges]


def format_header(columns: list[str]) -> list[str]:
    """Format the first two rows of a Markdown table, with all columns but the first aligned right."""
    return [format_row(columns), "|---" + "|---:" * (len(columns) - 1) + "|"]


def format_row(cells: list[str]) -> str:
    """Format a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def read_points(file: Path) -> list[dict[str, Any]]:
    """Return the measured numbers of streams of a run; none if its file does not exist."""
    return list(json.loads(file.read_text(encoding="utf-8"))["points"]) if file.exists() else []


def format_cell(run: ControllerRun, point: dict[str, Any]) -> str:
    """Format the row of one cell."""
    by_mode: dict[str, Any] = {entry["mode"]: entry for entry in point["cells"]}
    best, over_best, streams = point["best_fixed"], point["auto_over_best"], point["concurrency"]
    goal = MIN_OVER_BEST if streams <= FEW_STREAMS else 0.0
    start = (
        f"| {run.method} | {run.temperature} | {streams} | {by_mode['off']['tokens_per_second']:.1f} "
        f"| {format_ratio(by_mode['auto']['over_off'], MIN_OVER_PLAIN)} |"
    )
    unbiased = compute_unbiased_ratio(point)
    figures = f"{by_mode[best]['over_off']:.2f}x", format_ratio(over_best, goal)
    last = "" if unbiased is None else format_ratio(unbiased, goal), str(len(by_mode["auto"]["over_off_rounds"]))
    return f"{start} {' | '.join((best, *figures, *last))} |"


def format_ratio(ratio: float, goal: float) -> str:
    """Format a ratio; * if it is below the goal."""
    return f"{ratio:.2f}x" + ("*" if ratio < goal else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells' files")
    parser.add_argument("--methods", help=f"default: {METHODS}; with --pairs {MORE_METHODS} too")
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
    print("\n".join(format_pairs(runs, options.out) if options.pairs else format_table(runs, options.out)))


if __name__ == "__main__":
    main()
