"""Table of all drafting methods on four workloads, greedy and sampled at temperature 1.

    python benchmarks/methods.py [--workloads code,editing,logs,prose] [--methods ...] [--prompts 12] [--max-tokens 128]
                                 [--rounds 1] [--json FILE] [--markdown FILE]

A cell has the acceptance length, the speed-up, the share of time in the drafter, and the share that was reached of the
limit, at which only the target's passes over output and drafts take time. The acceptance length includes the
bonus token. The speed-up is the median over prompts of (time per token of plain decoding / time per token of the
method). All methods take turns prompt by prompt in one run. `name:8` drafts at most eight tokens in every step; `name`
alone adapts the length to measured times, which is the default. Sampling has no seed, so the rule is that of
`--verify`.
The last rows compare every ensemble `a+b` with the best of its members.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from foredraft import LLM, Sampling
from foredraft.bench import latency, methods, questions
from foredraft.bench.latency import LatencyRow
from foredraft.bench.pass_limits import LimitsMeter
from foredraft.cli.backend import silence_transformers
from foredraft.drafters.registry import load_methods

METHODS = (
    "draft_model:2,ngram:8,ngram_lm:8,suffix:8,lookahead,token_recycling,aggressive:16,medusa:4,blockwise:4,hydra:3,"
    "mlp_speculator:3,chimera:3,eagle:3,eagle3:3,dflash:3,early_exit:2"
)
MODES = {"greedy": Sampling(temperature=0.0, ignore_eos=True), "T = 1": Sampling(temperature=1.0, ignore_eos=True)}
RowsByColumn = dict[tuple[str, str], list[LatencyRow]]  # (workload, mode) -> one row per method


def measure_methods(llm: LLM, generators: Mapping[str, Any], options: argparse.Namespace) -> RowsByColumn:
    """Measure all columns; the speeds of the machine are printed on stderr."""
    rows_by_column: RowsByColumn = {}
    for workload in options.workloads.split(","):
        prompts = questions.load_questions(Path(workload), options.prompts)
        for mode, sampling in MODES.items():
            sampling = replace(sampling, max_tokens=options.max_tokens)

            def print_progress(name: str, column: str = f"{workload}, {mode}") -> None:
                print(f"\r{column}: {name:40}", end="", file=sys.stderr)

            context = llm.target.context_length
            meter = LimitsMeter(llm.target)
            outcome = latency.measure(
                generators, prompts, llm.tokenizer, context, sampling, options.rounds, print_progress, meter=meter
            )
            rows_by_column[workload, mode] = latency.build_rows(outcome, sampling, meter.limits)
            if meter.limits is not None:
                print(f"\r{workload}, {mode}: {meter.limits.describe_machine()}", file=sys.stderr)
    return rows_by_column


def format_table(rows_by_column: RowsByColumn) -> list[str]:
    """Format one row per method."""
    lines = ["| method | " + " | ".join(f"{workload}, {mode}" for workload, mode in rows_by_column) + " | same text |"]
    lines.append("|---|" + "---:|" * len(rows_by_column) + "---:|")
    for rows in zip(*rows_by_column.values(), strict=True):
        cells = [format_cell(row) for row in rows]
        comparable = [r for r in rows if r.identical is not None]
        agreement = f"{sum(r.identical or 0 for r in comparable)}/{sum(r.prompts for r in comparable)}"
        lines.append(f"| {rows[0].method} | " + " | ".join(cells) + f" | {agreement} |")
    return lines


def format_cell(row: LatencyRow) -> str:
    cell = f"{row.acceptance_length:.2f} · {row.speed_up:.2f}x · {row.draft_share:.0%}"
    limit = row.limit_tokens_per_second
    return cell if limit is None else f"{cell} · {row.tokens_per_second / limit:.0%}"


def format_ensembles(rows_by_column: RowsByColumn) -> list[str]:
    """Format one row per ensemble with its speed over that of its best member."""
    lines = []
    for index, row in enumerate(next(iter(rows_by_column.values()))):
        members = row.method.split(":")[0].split("+")
        if len(members) < 2:
            continue
        cells = []
        for rows in rows_by_column.values():
            member_speeds = [r.speed_up for r in rows if r.method.split(":")[0] in members]
            cells.append(f"{rows[index].speed_up / max(member_speeds):.2f}" if member_speeds else "-")
        lines.append(f"| {row.method} over the best of its members | " + " | ".join(cells) + " | |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--spec-model", default=None)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--workloads", default="code,editing,logs,prose")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--verify", default="auto", help="verification rule")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    silence_transformers()
    llm = LLM(options.model, drafter=None, verify=options.verify)
    chosen = methods.parse_all(options.methods.split(","), list(load_methods()))
    generators: dict[str, Any] = {methods.PLAIN: llm}
    for method in methods.attach_models(chosen, llm.target.model.config, options.spec_model, llm.is_builtin):
        generators[method.label] = llm.with_drafter(dict(method.spec))
    rows_by_column = measure_methods(llm, generators, options)
    text = "\n".join(format_table(rows_by_column) + format_ensembles(rows_by_column))
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.json:
        rows = {
            f"{workload}, {mode}": [asdict(row) for row in rows] for (workload, mode), rows in rows_by_column.items()
        }
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
