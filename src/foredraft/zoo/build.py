"""From Python sources to the built-in pair: tokenizer, target, drafts, figures, cards."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foredraft.zoo import corpus, tokens
from foredraft.zoo.cards import HELD_PACKAGES, card
from foredraft.zoo.collect import Corpus, collect
from foredraft.zoo.heads import EVERY, RECIPES, Heads, train_heads
from foredraft.zoo.measure import PairFigures, measure
from foredraft.zoo.ngram import build_table
from foredraft.zoo.recipe import DRAFT, TARGET, Recipe
from foredraft.zoo.seq2seq_build import DRAFT as SEQ2SEQ_DRAFT
from foredraft.zoo.seq2seq_build import PAIR, PairRecipe, build_pair
from foredraft.zoo.seq2seq_build import TARGET as SEQ2SEQ
from foredraft.zoo.train import Loss, Report, Run, distillation_loss, next_token_loss, train

MIN_HELD = 1000  # tokens of the held-out packages, below which nothing is measured
PARTS = ("target", "draft", "draft-undistilled")
SHIPPED = ("target", "draft", "ngram", *(head.method for head in RECIPES), SEQ2SEQ, SEQ2SEQ_DRAFT)


def build_all(
    out: Path,
    device: str = "cpu",
    target: Recipe = TARGET,
    draft: Recipe = DRAFT,
    heads: Heads = EVERY,
    pair: PairRecipe = PAIR,
    root: Path | None = None,
    report: Report = lambda part, step, steps, loss: None,
    say: Callable[[str], None] = lambda line: None,
    finish: bool = False,
) -> PairFigures:
    """Everything, resumable: a part whose folder holds a finished model is kept. Writes out/{target,draft,...}, the
    heads for the finished target, and last the encoder-decoder pair.

    `root` is another tree of Python files than the standard library's. `finish` begins the decay of a part that was
    stopped at its constant rate; parts that have not begun are trained in full.
    """
    out.mkdir(parents=True, exist_ok=True)
    data = collect(out, root)
    about = data.about
    say(f"{about.train_tokens:,} tokens of {len(about.packages) + 1} packages to train on, {len(data.held):,} held out")
    begun = {name for name in PARTS if (out / name / "checkpoint.pt").exists()}

    def make(name: str, recipe: Recipe, loss_of: Loss) -> None:
        run = Run(recipe, data.train, out / name, loss_of, device, _named(report, name), data.held)
        _part(out, name, lambda folder: train(run, finish and name in begun))

    make("target", target, next_token_loss)
    model = _load(out / "target")
    teacher = distillation_loss(model.to(device))
    make("draft", draft, teacher)
    make("draft-undistilled", draft, next_token_loss)
    _part(out, "ngram", lambda folder: build_table(data.library, data.held, folder, about.of_library))
    model.to("cpu")
    figures = _figures(out, model, data)
    for name in PARTS:
        tokens.save_tokenizer(tokens.load_tokenizer(out), out / name)
        recipe = target if name == "target" else draft
        log = (out / name / "log.jsonl").read_text()
        (out / name / "README.md").write_text(card(name, recipe, figures, about, log))
    train_heads(out, device, data.train, report, say, heads)
    build_pair(out, device, tokens.load_tokenizer(out), *corpus.split(root), report, pair)
    return figures["draft"]


def _figures(out: Path, target: Any, data: Corpus) -> dict[str, PairFigures]:
    figures = {name: measure(target, _load(out / name), data.held) for name in PARTS[1:]}
    if len(data.held_packages) > MIN_HELD:
        figures[HELD_PACKAGES] = measure(target, _load(out / "draft"), data.held_packages)
    (out / "figures.json").write_text(json.dumps({k: asdict(v) for k, v in figures.items()}, indent=1) + "\n")
    return figures


def install(out: Path, package: Path) -> None:
    """Copy the finished models into the package's zoo folder, with their cards and logs."""
    for name in SHIPPED:
        shutil.rmtree(package / name, ignore_errors=True)
        shutil.copytree(out / name, package / name, ignore=shutil.ignore_patterns("checkpoint*", "training.json"))


def _part(out: Path, name: str, make: Callable[[Path], object]) -> None:
    if not (out / name / "model.safetensors").exists():
        make(out / name)


def _load(folder: Path):  # type: ignore[no-untyped-def]  # a PreTrainedModel, which transformers leaves untyped
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def _named(report: Report, part: str) -> Callable[[int, int, float], None]:
    return lambda step, steps, loss: report(part, step, steps, loss)
