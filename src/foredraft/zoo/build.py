"""From the standard library's sources to the built-in pair: tokenizer, target, drafts, figures, cards."""

import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from foredraft.zoo import corpus, tokens
from foredraft.zoo.heads import EVERY, RECIPES, Heads, train_heads
from foredraft.zoo.measure import MAX_DRAFT, PairFigures, measure
from foredraft.zoo.ngram import build_table
from foredraft.zoo.recipe import DRAFT, TARGET, Recipe
from foredraft.zoo.seq2seq_build import DRAFT as SEQ2SEQ_DRAFT
from foredraft.zoo.seq2seq_build import PAIR, PairRecipe, build_pair
from foredraft.zoo.seq2seq_build import TARGET as SEQ2SEQ
from foredraft.zoo.train import Report, distillation_loss, next_token_loss, train

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
) -> PairFigures:
    """Everything, resumable: a part whose folder holds a finished model is kept. Writes out/{target,draft,...}, the
    heads for the finished target, and last the encoder-decoder pair.

    `root` is another tree of Python files than the standard library's.
    """
    out.mkdir(parents=True, exist_ok=True)
    train_ids, held_ids, about = _corpus(out, root)
    say(f"{len(train_ids):,} tokens to train on, {len(held_ids):,} held out")
    _part(
        out,
        "target",
        lambda folder: train(target, train_ids, folder, next_token_loss, device, _named(report, "target")),
    )
    model = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.bfloat16).eval()
    teacher = distillation_loss(model.to(device))
    _part(out, "draft", lambda folder: train(draft, train_ids, folder, teacher, device, _named(report, "draft")))
    _part(
        out,
        "draft-undistilled",
        lambda folder: train(draft, train_ids, folder, next_token_loss, device, _named(report, "draft-undistilled")),
    )
    _part(out, "ngram", lambda folder: build_table(train_ids, held_ids, folder, about))
    model.to("cpu")
    figures = {name: measure(model, _load(out / name), held_ids) for name in PARTS[1:]}
    (out / "figures.json").write_text(json.dumps({k: asdict(v) for k, v in figures.items()}, indent=1) + "\n")
    for name in PARTS:
        tokens.save_tokenizer(tokens.load_tokenizer(out), out / name)
        recipe = target if name == "target" else draft
        (out / name / "README.md").write_text(card(name, recipe, figures, about))
    train_heads(out, device, train_ids, report, say, heads)
    build_pair(out, device, tokens.load_tokenizer(out), *corpus.split(root), report, pair)
    return figures["draft"]


def install(out: Path, package: Path) -> None:
    """Copy the finished models into the package's zoo folder, with their cards and logs."""
    for name in SHIPPED:
        shutil.rmtree(package / name, ignore_errors=True)
        shutil.copytree(out / name, package / name, ignore=shutil.ignore_patterns("checkpoint*", "training.json"))


def card(name: str, recipe: Recipe, figures: dict[str, PairFigures], about: dict[str, str]) -> str:
    """The model card, as Markdown."""
    own = figures.get(name, figures["draft"])
    loss = own.target_loss if name == "target" else own.draft_loss
    stages = "; ".join(f"{s.steps} steps, {s.layers} layers, windows of {s.context}" for s in recipe.stages)
    distilled = "KL(p || q) to the target's law" if name == "draft" else "next-token cross-entropy"
    lines = [
        f"# Foredraft built-in {name}",
        "",
        "A small Llama-architecture model of Python source code, for trying and testing speculative decoding.",
        "It is far too small to be a useful assistant.",
        "",
        f"- Data: the standard library of CPython {about['python']}, {about['train_tokens']} training tokens "
        f"(digest {about['digest']}); held out, with their tests: {', '.join(sorted(corpus.HELD_OUT))}.",
        f"- Recipe: {distilled}; {stages}; {recipe.batch_tokens} tokens a step; Muon for matrices, AdamW for the rest, "
        f"learning rate {recipe.learning_rate}, linear decay over the last {recipe.decay:.0%}; seed {recipe.seed}. "
        "`foredraft zoo train` repeats it.",
        f"- Held-out loss: {loss:.3f} nats per token ({own.num_tokens:,} tokens).",
        "",
    ]
    if name != "target":
        lines += _acceptance(figures)
    return "\n".join(lines)


def _acceptance(figures: dict[str, PairFigures]) -> list[str]:
    lines = [
        "Acceptance against the built-in target, held-out text, p and q at temperature 1:",
        "",
        "| draft | alpha = mean sum min(p, q) | greedy agreement | " + " | ".join(f"K={k}" for k in range(1, 9)) + " |",
        "|---|---|---|" + "---|" * MAX_DRAFT,
    ]
    for name, f in figures.items():
        for law, lengths, rate in (("sampled", f.lengths, f.alpha), ("greedy", f.greedy_lengths, f.greedy_agreement)):
            cells = " | ".join(f"{length:.2f}" for length in lengths)
            first = f"{rate:.3f} |  " if law == "sampled" else f" | {rate:.3f} "
            lines.append(f"| {name}, {law} | {first}| {cells} |")
    lines += ["", "The columns K are the expected acceptance length, bonus included, for drafts of K tokens.", ""]
    return lines


def _corpus(out: Path, root: Path | None) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    train_files, held_files = corpus.split(root)
    if not (out / "tokenizer.json").exists():
        tokens.train_tokenizer(train_files).save(str(out / "tokenizer.json"))
    tokenizer = tokens.load_tokenizer(out)
    train_ids, held_ids = tokens.encode(tokenizer, train_files), tokens.encode(tokenizer, held_files)
    np.save(out / "held.npy", held_ids)
    about = {
        "python": platform.python_version(),
        "digest": corpus.digest(train_files),
        "train_tokens": f"{len(train_ids):,}",
    }
    return train_ids, held_ids, about


def _part(out: Path, name: str, make: Callable[[Path], object]) -> None:
    if not (out / name / "model.safetensors").exists():
        make(out / name)


def _load(folder: Path):  # type: ignore[no-untyped-def]  # a PreTrainedModel, which transformers leaves untyped
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def _named(report: Report, part: str) -> Callable[[int, int, float], None]:
    return lambda step, steps, loss: report(part, step, steps, loss)
