"""Every drafting method on four kinds of work, greedy and drawn at temperature 1: one table.

    python benchmarks/methods.py [--workloads code,editing,logs,prose] [--methods ...] [--prompts 12] [--max-tokens 128]
                                 [--rounds 1] [--json FILE] [--markdown FILE]

AL is the acceptance length, bonus included; the speed-up is the median over prompts of plain decoding's time for a
token over the method's, in one run, prompt by prompt in turn; drafting is its share of the time. `name:8` drafts eight
tokens at most, always; `name` alone leaves the length to measurement, which is what a user gets who names none. Drawn
texts are not seeded: the rule is `reject`. The last lines set every `a+b` against the better of its parts.
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
from foredraft.cli.backend import silence_transformers
from foredraft.drafters.registry import load_methods as registered

METHODS = (
    "draft_model:2,ngram:8,ngram_lm:8,suffix:8,lookahead,aggressive:16,medusa:4,blockwise:4,hydra:3,mlp_speculator:3,"
    "chimera:3,eagle:3,eagle3:3,early_exit:2"
)
MODES = {"greedy": Sampling(temperature=0.0, ignore_eos=True), "T = 1": Sampling(temperature=1.0, ignore_eos=True)}
RowsByColumn = dict[tuple[str, str], list[LatencyRow]]  # (workload, mode) -> a row for every method


def measure_methods(llm: LLM, generators: Mapping[str, Any], options: argparse.Namespace) -> RowsByColumn:
    found: RowsByColumn = {}
    for workload in options.workloads.split(","):
        asked = questions.load_questions(Path(workload), options.prompts)
        for mode, sampling in MODES.items():
            sampling = replace(sampling, max_tokens=options.max_tokens)

            def step(name: str, where: str = f"{workload}, {mode}") -> None:
                print(f"\r{where}: {name:40}", end="", file=sys.stderr)

            context = llm.target.context_length
            outcome = latency.measure(generators, asked, llm.tokenizer, context, sampling, options.rounds, step)
            found[workload, mode] = latency.build_rows(outcome, sampling)
    print(file=sys.stderr)
    return found


def format_table(found: RowsByColumn) -> list[str]:
    """A line for every method; in a cell the acceptance length, the speed-up, the share of drafting."""
    lines = ["| method | " + " | ".join(f"{workload}, {mode}" for workload, mode in found) + " | same text |"]
    lines.append("|---|" + "---:|" * len(found) + "---:|")
    for rows in zip(*found.values(), strict=True):
        cells = [f"{r.acceptance_length:.2f} · {r.speed_up:.2f}x · {r.draft_share:.0%}" for r in rows]
        same = [r for r in rows if r.identical is not None]
        agreement = f"{sum(r.identical or 0 for r in same)}/{sum(r.prompts for r in same)}"
        lines.append(f"| {rows[0].method} | " + " | ".join(cells) + f" | {agreement} |")
    return lines


def format_ensembles(found: RowsByColumn) -> list[str]:
    """For every composed method its speed over that of its best part, by column."""
    lines = []
    for place, row in enumerate(next(iter(found.values()))):
        parts = row.method.split(":")[0].split("+")
        if len(parts) < 2:
            continue
        cells = []
        for rows in found.values():
            alone = [r.speed_up for r in rows if r.method.split(":")[0] in parts]
            cells.append(f"{rows[place].speed_up / max(alone):.2f}" if alone else "-")
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
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    silence_transformers()
    llm = LLM(options.model, drafter=None)
    chosen = methods.parse_all(options.methods.split(","), list(registered()))
    generators: dict[str, Any] = {methods.PLAIN: llm}
    for method in methods.attach_models(chosen, llm.target.model.config, options.spec_model, llm.is_builtin):
        generators[method.label] = llm.with_drafter(dict(method.spec))
    found = measure_methods(llm, generators, options)
    text = "\n".join(format_table(found) + format_ensembles(found))
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.json:
        rows = {f"{workload}, {mode}": [asdict(row) for row in rows] for (workload, mode), rows in found.items()}
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
