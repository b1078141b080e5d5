r"""Table of one, two and three draft models that draft together, as in SpecInfer (2305.09781), for the built-in target.

    python benchmarks/several_drafts.py --make FOLDER     # trains the models that are not built in: an hour on one core
    python benchmarks/several_drafts.py --models FOLDER [--prompts 64] [--max-tokens 96] [--length 4]

`--make` writes three models to FOLDER by the recipe of the built-in second draft model (`built_in.recipe` of the method
draft_model): `plain_2`, without `--boost`; `strict_2`, with `boost_weight=0`, which learns nothing where the first
predicts the target; `draft_3`, with `--boost draft --boost draft_2`. A stopped run is continued.

Each model drafts a chain, or a tree with the same depth and as many nodes as chains of all merged models have at most.
Greedy chains share nodes, so merged trees are smaller; the column nodes is the mean that a pass verified. All methods
take turns prompt by prompt. The prompts are of modules that no model was trained on. Tokens per pass are the acceptance
length, bonus included. The speed is the median over prompts of (time per token of plain decoding / time per token).
The rule is `reject` in every row, so chains and trees compare.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foredraft import LLM, Sampling, zoo
from foredraft.bench import latency, methods, questions
from foredraft.bench.latency import LatencyOutcome
from foredraft.drafters.method import HeadRecipe
from foredraft.outputs import sum_stats
from foredraft.train.config import DataConfig, OptimizationConfig
from foredraft.train.run import train
from foredraft.zoo_training.collect import collect
from foredraft.zoo_training.generated import CORPUS_TOKENS, NUM_DOCUMENTS, write_texts
from foredraft.zoo_training.heads import TEXTS_FILE, list_recipes, make_plan

METHOD = "draft_model"
MODES = {"greedy": Sampling(temperature=0.0, ignore_eos=True), "T = 1": Sampling(temperature=1.0, ignore_eos=True)}


def make_recipes() -> list[HeadRecipe]:
    """Return the recipes of the models that are not built in."""
    second = list_recipes()[METHOD]
    return [
        replace(second, folder="plain_2", boost=()),
        replace(second, folder="strict_2", settings={**second.settings, "boost_weight": "0"}),
        replace(second, folder="draft_3", boost=(*second.boost, second.folder)),
    ]


def make_models(out: Path) -> None:
    """Train the models into `out`, on the standard library and on texts of the built-in target."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("target", "draft", "draft_2"):
        if not (out / name).exists():
            (out / name).symlink_to(zoo.find_folder(name).resolve(), target_is_directory=True)
    if not (out / "tokenizer.json").exists():
        (out / "tokenizer.json").write_bytes((out / "target" / "tokenizer.json").read_bytes())
    data, texts, held_out = collect(out, candidates=[]), out / TEXTS_FILE, out / "held.npy"
    if not texts.exists():
        llm = LLM(out / "target", None, dtype="bfloat16")
        write_texts(llm, np.asarray(data.train), texts, NUM_DOCUMENTS, CORPUS_TOKENS)
    for recipe in make_recipes():
        data_files = DataConfig((str(texts),), (str(held_out),))
        batch_tokens = OptimizationConfig().batch_tokens
        plan = make_plan(METHOD, recipe, out / "target", out / recipe.folder, data_files, batch_tokens, "cpu")
        train(plan, print, lambda s, name=recipe.folder: print(f"\r{name} {s.step}/{s.steps}", end="", file=sys.stderr))  # type: ignore[misc]


@dataclass(frozen=True)
class TableRow:
    """One way to draft, and its options as in `LLM(drafter=...)`."""

    label: str
    spec: dict[str, Any]


def build_rows(models: Path | None, length: int) -> Iterator[TableRow]:
    """Build the rows: every model alone as a chain and as a tree, then models merged.

    Args:
        models: folder that `--make` wrote; None = only what is built in.
        length: draft tokens of each chain, and the depth of each tree.
    """
    first, second = (str(zoo.find_folder(name)) for name in ("draft", "draft_2"))
    made = {} if models is None else {recipe.folder: str(models / recipe.folder) for recipe in make_recipes()}
    alone = {"draft": first, "draft_2": second, **made}
    for name, path in alone.items():
        yield TableRow(f"{name}, chain", _make_spec([path], length))
    for size in (2 * length, 3 * length):
        yield TableRow(f"draft, tree of {size}", _make_spec([first], length, tree_nodes=size))
    yield TableRow(f"draft_2, tree of {2 * length}", _make_spec([second], length, tree_nodes=2 * length))
    for name, path in alone.items():
        if name not in ("draft", "draft_3"):
            yield TableRow(f"draft + {name}", _make_spec([first, path], length))
    tree = {"draft_model.tree_nodes": 2 * length}
    yield TableRow(f"draft, tree of {2 * length} + draft_2", _make_spec([first, second], length, **tree))
    if made:
        yield TableRow("draft + draft_2 + draft_3", _make_spec([first, second, made["draft_3"]], length))


def _make_spec(models: list[str], length: int, **options: Any) -> dict[str, Any]:
    merge = {"mode": "merge"} if len(models) > 1 else {}
    model = models if len(models) > 1 else models[0]
    return {"method": METHOD, "model": model, "num_speculative_tokens": length, **merge, **options}


def format_mode(outcome: LatencyOutcome, sampling: Sampling) -> dict[str, list[str]]:
    """Return the cells of one mode by row: tokens per pass, nodes per pass, speed and equal outputs."""
    cells = {}
    for row in latency.build_rows(outcome, sampling):
        stats = sum_stats(c.stats for run in outcome.runs[row.method] for c in run.completions)
        nodes = stats.num_drafted / stats.target_passes
        cells[row.method] = [f"{row.acceptance_length:.2f}", f"{nodes:.1f}", f"{row.speed_up:.2f}x"]
    return cells


def measure(options: argparse.Namespace) -> str:
    """Measure all rows and return the table as Markdown."""
    llm = LLM(None, drafter=None, verify="reject")
    rows = list(build_rows(options.models, options.length))
    generators: dict[str, Any] = {methods.PLAIN: llm} | {row.label: llm.with_drafter(row.spec) for row in rows}
    prompts = questions.load_questions(None, options.prompts)
    cells: dict[str, list[str]] = {label: [] for label in generators}
    for mode, sampling in MODES.items():
        outcome = latency.measure(
            generators, prompts, llm.tokenizer, llm.target.context_length,
            replace(sampling, max_tokens=options.max_tokens), options.rounds,
            lambda name, mode=mode: print(f"\r{mode}: {name:32}", end="", file=sys.stderr),  # type: ignore[misc]
        )  # fmt: skip
        for label, figures in format_mode(outcome, sampling).items():
            cells[label] += figures
    print(file=sys.stderr)
    header = "| drafts | " + " | ".join(f"tokens per pass, {mode} | nodes | speed" for mode in MODES) + " |"
    lines = [header, "|---|" + "---:|---:|---:|" * len(MODES)]
    return "\n".join([*lines, *(f"| {label} | {' | '.join(figures)} |" for label, figures in cells.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    parser.add_argument("--models", type=Path, metavar="FOLDER")
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    if options.make is not None:
        make_models(options.make)
    else:
        print(measure(options))


if __name__ == "__main__":
    main()
