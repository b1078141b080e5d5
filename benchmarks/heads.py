r"""Table of all drafting methods on held-out prompts, greedy and sampled at temperature 1, with trees of several sizes.

    python benchmarks/heads.py [--prompts 50] [--max-tokens 128] [--budgets 4,8,16,32,64] [--json FILE] [--plot FILE]

The speed-up is the median over prompts of (time per token of plain decoding / time per token of the method). All
methods take turns prompt by prompt in one run. The acceptance length includes the bonus token. Sampling has no seed, so
the rule is that of `--verify`.

This command plots the figures by the number of heads:

    python benchmarks/heads.py --methods medusa:1,medusa:2,medusa:3,medusa:4,medusa:5,medusa:6,medusa:7,medusa:8 \
        --budgets "" --spec-model FOLDER --plot docs/medusa-heads.png
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from foredraft import LLM, Sampling
from foredraft.bench import latency, methods, questions, report
from foredraft.bench.latency import LatencyRow
from foredraft.drafters.registry import load_methods

# Default of --methods; the number is the draft length.
CHAINS = "draft_model:2,ngram:8,ngram_lm:8,medusa:4,mlp_speculator:3,eagle:3,eagle3:3"
# Default of --trees; the braces stand for the number of nodes from --budgets.
TREES = ("medusa:4:tree_nodes={}", "mlp_speculator:4:tree_nodes={}", "eagle:5:tree_nodes={}", "eagle3:5:tree_nodes={}")
MODES = {"greedy": Sampling(temperature=0.0, ignore_eos=True), "T = 1": Sampling(temperature=1.0, ignore_eos=True)}


def parse_methods(options: argparse.Namespace) -> list[methods.BenchMethod]:
    texts = options.methods.split(",")
    for budget in filter(None, options.budgets.split(",")):
        texts += [template.format(budget) for template in options.trees.split(",") if template]
    return methods.parse_all(texts, list(load_methods()))


def measure_methods(
    llm: LLM, chosen: Sequence[methods.BenchMethod], options: argparse.Namespace
) -> dict[str, list[LatencyRow]]:
    generators: dict[str, Any] = {methods.PLAIN: llm}
    for method in methods.attach_models(chosen, llm.target.model.config, options.spec_model, llm.is_builtin):
        generators[method.label] = llm.with_drafter(dict(method.spec))
    rows_by_mode: dict[str, list[LatencyRow]] = {}
    for mode, sampling in MODES.items():
        sampling = replace(sampling, max_tokens=options.max_tokens)
        prompts = questions.load_questions(None, options.prompts)

        def print_progress(name: str, mode: str = mode) -> None:
            print(f"\r{mode}: {name:40}", end="", file=sys.stderr)

        context = llm.target.context_length
        outcome = latency.measure(generators, prompts, llm.tokenizer, context, sampling, options.rounds, print_progress)
        rows_by_mode[mode] = latency.build_rows(outcome, sampling)
    print(file=sys.stderr)
    return rows_by_mode


def format_table(rows_by_mode: dict[str, list[LatencyRow]]) -> str:
    header = "| method | " + " | ".join(f"AL, {mode} | speed-up | drafting" for mode in rows_by_mode) + " | same text |"
    lines = [header, "|---|" + "---:|---:|---:|" * len(rows_by_mode) + "---:|"]
    for rows in zip(*rows_by_mode.values(), strict=True):
        cells = [f"{r.acceptance_length:.2f} | {r.speed_up:.2f}x | {r.draft_share:.0%}" for r in rows]
        lines.append(f"| {rows[0].method} | " + " | ".join(cells) + f" | {rows[0].agreement} |")
    return "\n".join(lines)


def save_plot(rows_by_mode: dict[str, list[LatencyRow]], path: Path) -> None:
    """Write a plot of acceptance length and speed-up, with methods in the order of the table."""
    report.require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, field, title in zip(
        axes, ("acceptance_length", "speed_up"), ("acceptance length", "speed-up over plain decoding"), strict=True
    ):
        for mode, rows in rows_by_mode.items():
            drafting_rows = [row for row in rows if row.method != methods.PLAIN]
            axis.plot(
                [row.method for row in drafting_rows],
                [getattr(row, field) for row in drafting_rows],
                marker="o",
                linewidth=0.6,
                label=mode,
            )
        axis.set_title(title)
        axis.set_ylim(bottom=0.9 if field == "acceptance_length" else 0.0)
        axis.grid(alpha=0.3)
        axis.tick_params(axis="x", rotation=90 if len(drafting_rows) > 8 else 30)
        axis.legend()
    axes[1].axhline(1.0, color="#8a8f98", linewidth=0.8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--spec-model", default=None)
    parser.add_argument("--methods", default=CHAINS)
    parser.add_argument("--trees", default=",".join(TREES))
    parser.add_argument("--budgets", default="4,8,16,32,64")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--verify", default="auto", help="verification rule")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    llm = LLM(options.model, drafter=None, verify=options.verify)
    rows_by_mode = measure_methods(llm, parse_methods(options), options)
    print(format_table(rows_by_mode))
    if options.json:
        options.json.write_text(
            json.dumps({mode: [asdict(row) for row in rows] for mode, rows in rows_by_mode.items()})
        )
    if options.plot:
        save_plot(rows_by_mode, options.plot)


if __name__ == "__main__":
    main()
