"""Build of all built-in models: tokenizer, target, draft models, heads, n-gram table, figures and model cards."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from foredraft.train.checkpoint import TrainingCheckpoints
from foredraft.train.precision import choose_training_dtype
from foredraft.zoo import corpus
from foredraft.zoo_training import tokens
from foredraft.zoo_training.cards import HELD_OUT_PACKAGES_KEY, render_card
from foredraft.zoo_training.collect import Corpus, collect
from foredraft.zoo_training.distinct import measure_distinct_share
from foredraft.zoo_training.heads import (
    CARD_FILE,
    HeadsPlan,
    list_head_folders,
    load_target,
    prepare_code_target,
    train_heads,
)
from foredraft.zoo_training.measure import PairMetrics, measure_pair
from foredraft.zoo_training.ngram import build_table
from foredraft.zoo_training.recipe import DRAFT_RECIPE, TARGET_RECIPE, LlamaRecipe
from foredraft.zoo_training.seq2seq_build import DRAFT_NAME as SEQ2SEQ_DRAFT
from foredraft.zoo_training.seq2seq_build import PAIR_RECIPE, Seq2SeqPairRecipe, build_pair
from foredraft.zoo_training.seq2seq_build import TARGET_NAME as SEQ2SEQ
from foredraft.zoo_training.train import (
    LOG_FILE,
    LossFunction,
    PartProgressCallback,
    PretrainingRun,
    compute_next_token_loss,
    make_distillation_loss,
    train,
)

WEIGHTS_FILE = "model.safetensors"
MIN_HELD_OUT_TOKENS = 1000  # the held-out packages are measured only if they have more tokens
UNDISTILLED = "draft-undistilled"
PARTS = ("target", "draft")


def build_all(
    out: Path,
    device: str = "cpu",
    target: LlamaRecipe = TARGET_RECIPE,
    draft: LlamaRecipe = DRAFT_RECIPE,
    heads: HeadsPlan | None = None,
    pair: Seq2SeqPairRecipe = PAIR_RECIPE,
    root: Path | None = None,
    report: PartProgressCallback = lambda part, step, steps, loss: None,
    log_line: Callable[[str], None] = lambda line: None,
    finish: bool = False,
    is_compiled: bool = False,
    with_undistilled: bool = False,
) -> PairMetrics:
    """Train all built-in models into `out`: the pair, the n-gram table, the heads, and the same for encoder-decoders.

    An interrupted build is resumed: finished models are kept. The result is the figures of the draft model.

    Args:
        out: folder of the models, one subfolder each.
        device: device of training. Default "cpu".
        target: recipe of the target.
        draft: recipe of the draft model.
        heads: recipes of the heads. Default None = those of all methods.
        pair: recipes of the encoder-decoder pair and its heads.
        root: folder of Python files to train on. Default None = the standard library and installed packages.
        report: called with model name, step, steps and loss.
        log_line: called with each line for the user.
        finish: begin the decay of a model that was interrupted at its constant learning rate. Default False.
        is_compiled: train target and draft model through torch.compile. Default False.
        with_undistilled: train a draft model without the target last, for comparison. Default False.
    """
    out.mkdir(parents=True, exist_ok=True)
    data = collect(out, root)
    log_line(_describe_corpus(data))
    dtype = choose_training_dtype(device)
    interrupted = {name for name in (*PARTS, UNDISTILLED) if TrainingCheckpoints(out / name).find_latest() is not None}

    def build(name: str, recipe: LlamaRecipe, loss: LossFunction) -> None:
        run = PretrainingRun(
            recipe, data.train, out / name, loss, device, _bind_part(report, name), data.held_out,
            is_compiled=is_compiled, dtype=dtype,
        )  # fmt: skip
        _build_part(out, name, lambda folder: train(run, finish and name in interrupted))

    build("target", target, compute_next_token_loss)
    model = _load(out / "target")
    build("draft", draft, make_distillation_loss(model.to(device, dtype)))
    about = data.summary.library_description
    _build_part(out, "ngram", lambda folder: build_table(data.library, data.held_out, folder, about))
    model.to("cpu", torch.bfloat16)
    recipes = {"target": target, "draft": draft, UNDISTILLED: draft}
    figures = _measure_and_write_cards(out, model, recipes, data)
    heads = heads or HeadsPlan()
    train_heads(prepare_code_target(out, device, data.train, log_line, heads), out, device, report, log_line, heads)
    build_pair(out, device, tokens.load_tokenizer(out), *corpus.split(root), report, log_line, pair)
    if with_undistilled:
        build(UNDISTILLED, draft, compute_next_token_loss)
        figures = _measure_and_write_cards(out, model, recipes, data)
    return figures["draft"]


def _describe_corpus(data: Corpus) -> str:
    packages, tokens_held_out = len(data.summary.packages) + 1, len(data.held_out)
    return f"{data.summary.train_tokens:,} tokens of {packages} packages to train on, {tokens_held_out:,} held out"


def _measure_and_write_cards(
    out: Path, target: Any, recipes: Mapping[str, LlamaRecipe], data: Corpus
) -> dict[str, PairMetrics]:
    """Measure the draft models that there are, and give every model of `recipes` its tokenizer and its card."""
    trained = [name for name in recipes if (out / name / WEIGHTS_FILE).exists()]
    for name in trained:
        tokens.save_tokenizer(tokens.load_tokenizer(out), out / name)
    distinct = measure_distinct_share(load_target(out / "target", "cpu"))
    figures = _measure_drafts(out, target, [name for name in trained if name != "target"], data)
    for name in trained:
        log = (out / name / LOG_FILE).read_text()
        (out / name / CARD_FILE).write_text(render_card(name, recipes[name], figures, data.summary, log, distinct))
    return figures


def _measure_drafts(out: Path, target: Any, drafts: Iterable[str], data: Corpus) -> dict[str, PairMetrics]:
    figures = {name: measure_pair(target, _load(out / name), data.held_out) for name in drafts}
    if len(data.held_out_packages) > MIN_HELD_OUT_TOKENS:
        figures[HELD_OUT_PACKAGES_KEY] = measure_pair(target, _load(out / "draft"), data.held_out_packages)
    (out / "figures.json").write_text(json.dumps({k: asdict(v) for k, v in figures.items()}, indent=1) + "\n")
    return figures


def install(out: Path, package: Path) -> tuple[list[str], list[str]]:
    """Copy the finished models with their cards and logs from `out` to the zoo folder `package`.

    Returns:
        Names of the models that were copied, and of those that `out` does not have; the latter stay as they are.
    """
    names = ["target", "draft", "ngram", *list_head_folders(), SEQ2SEQ, SEQ2SEQ_DRAFT]
    finished = [name for name in names if (out / name / CARD_FILE).exists()]
    for name in finished:
        shutil.rmtree(package / name, ignore_errors=True)
        shutil.copytree(out / name, package / name, ignore=shutil.ignore_patterns("*checkpoint-*", "training.json"))
    return finished, [name for name in names if name not in finished]


def _build_part(out: Path, name: str, build: Callable[[Path], object]) -> None:
    if not (out / name / WEIGHTS_FILE).exists():
        build(out / name)


def _load(folder: Path):  # type: ignore[no-untyped-def]  # a PreTrainedModel, which transformers leaves untyped
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def _bind_part(report: PartProgressCallback, part: str) -> Callable[[int, int, float], None]:
    return lambda step, steps, loss: report(part, step, steps, loss)
