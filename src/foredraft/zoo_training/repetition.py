"""Unlikelihood training: a language model learns not to repeat itself in its greedy text.

Greedy text of a small model falls into loops. In every step the model sees greedy continuations of prompts from the
corpus, generated a few steps before, and the probabilities of their repeated tokens are lowered. On the corpus, its
distribution is kept near that of the model as it was before (KL divergence). A token is repeated if an n-gram that
contains it occurred several times before in the same continuation: code repeats itself a little, and a model that must
not do so at all can no longer copy names.

Reference:
    arXiv 1908.04319, the sequence-level loss.
"""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from foredraft.drafters.losses import kl
from foredraft.llm import LLM
from foredraft.sampling.params import Sampling
from foredraft.train.checkpoint import TrainingCheckpoints
from foredraft.train.optimizer import LearningRateSchedule, MasterWeightOptimizer
from foredraft.train.stopping import handle_stop_signals
from foredraft.zoo_training.batches import WindowBatches
from foredraft.zoo_training.train import (
    LOG_FILE,
    MAX_GRAD_NORM,
    ProgressCallback,
    compute_logits,
    measure_held_out_loss,
)

NGRAM = 4  # tokens of the n-grams that count as repeated
ALLOWED = 3  # times that an n-gram may occur in a continuation
OPTIMIZER = "adamw"
MAX_PROBABILITY = 1 - 1e-4  # bounds log(1 - p)
MICRO_ROWS = 8  # sequences per forward and backward pass


@dataclass(frozen=True)
class RepetitionRecipe:
    """Schedule of the training. The learning rate warms up and decays linearly to zero."""

    learning_rate: float = 3e-5
    weight: float = 1.0  # of the unlikelihood loss; that of the KL divergence is 1
    steps: int = 160
    warmup: int = 10  # steps
    texts: int = 32  # continuations per step
    new_tokens: int = 128  # tokens per continuation
    prompt_tokens: tuple[int, int] = (8, 64)  # shortest and longest prompt; the upper bound is exclusive
    steps_per_round: int = 8  # steps between generations
    windows: int = 8  # windows of the corpus per step
    context: int = 256  # tokens per window
    seed: int = 7
    eval_every: int = 5  # rounds between measurements of the held-out loss


REPETITION_RECIPE = RepetitionRecipe()


@dataclass(frozen=True)
class GreedyText:
    """Prompt and its greedy continuation."""

    prompt: Sequence[int]
    continuation: Sequence[int]


@dataclass(frozen=True)
class RepetitionRun:
    """Inputs, output folder and progress callback of a training run."""

    recipe: RepetitionRecipe
    source: Path  # folder of the model as it is before
    folder: Path
    ids: np.ndarray  # token ids of the corpus, [T]
    held_out_ids: np.ndarray  # token ids whose loss is logged, [T]
    device: str = "cpu"
    progress: ProgressCallback = lambda step, steps, loss: None


def mark_repeats(tokens: Sequence[int], size: int = NGRAM, allowed: int = ALLOWED) -> np.ndarray:
    """Return which tokens are in an n-gram of `size` tokens that occurred `allowed` times before, [T] bool."""
    marked = np.zeros(len(tokens), dtype=bool)
    counts: Counter[tuple[int, ...]] = Counter()
    for i in range(len(tokens) - size + 1):
        ngram = tuple(tokens[i : i + size])
        if counts[ngram] >= allowed:
            marked[i : i + size] = True
        counts[ngram] += 1
    return marked


def compute_distinct_share(tokens: Sequence[int], size: int = NGRAM) -> float:
    """Return the number of different n-grams of a sequence over that of its n-grams; 1.0 for a shorter sequence."""
    ngrams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def reduce_repetition(run: RepetitionRun) -> None:
    """Train the model of `run.source`, and write it to `run.folder` with its log.

    An interrupted run is resumed from its last checkpoint.

    Raises:
        KeyboardInterrupt: a signal stopped the run; at most one round is repeated.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    model, before = (
        AutoModelForCausalLM.from_pretrained(run.source, dtype=torch.bfloat16).to(run.device) for _ in range(2)
    )
    optimizer = MasterWeightOptimizer(OPTIMIZER, model, run.recipe.learning_rate)
    checkpoints = TrainingCheckpoints(run.folder)
    latest = checkpoints.find_latest()
    step = 0 if latest is None else int(checkpoints.load(latest, {"model": model}, optimizer)["step"])
    if latest is None:
        shutil.copy(run.source / LOG_FILE, run.folder / LOG_FILE)
    with handle_stop_signals() as is_stopped:
        while step < run.recipe.steps:
            end = min(step + run.recipe.steps_per_round, run.recipe.steps)
            _train_round(run, model, before, optimizer, range(step, end))
            step = end
            checkpoints.save(step, {"model": model}, optimizer.state_dict(), {})
            if is_stopped():
                raise KeyboardInterrupt
    model.save_pretrained(run.folder)
    checkpoints.delete()


def generate_texts(model: Any, prompts: Sequence[Sequence[int]], new_tokens: int, device: str) -> list[GreedyText]:
    """Continue prompts greedily with the present weights of a transformers model; no continuation ends early."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        llm = LLM(folder, None, dtype="bfloat16", tokenizer=None, device=device)
    sampling = Sampling(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    completions = llm.generate([list(prompt) for prompt in prompts], sampling)
    return [GreedyText(prompt, completion.token_ids) for prompt, completion in zip(prompts, completions, strict=True)]


def _train_round(run: RepetitionRun, model: Any, before: Any, optimizer: MasterWeightOptimizer, steps: range) -> None:
    """Generate the texts of some steps, and make these steps."""
    recipe = run.recipe
    texts = generate_texts(model, _choose_prompts(run, steps), recipe.new_tokens, run.device)
    batches = WindowBatches(run.ids, recipe.context, recipe.windows, recipe.seed, run.device)
    schedule = LearningRateSchedule(recipe.steps, recipe.warmup, "linear", decay_start=0)
    change = unlikelihood = 0.0
    model.train()
    for i, step in enumerate(steps):
        change = _add_corpus_gradient(model, before, batches.get_batch(step))
        own_texts = texts[i * recipe.texts : (i + 1) * recipe.texts]
        unlikelihood = _add_text_gradient(model, own_texts, recipe.weight, run.device)
        optimizer.step(schedule.compute_scale(step), MAX_GRAD_NORM)
        run.progress(step + 1, recipe.steps, change + unlikelihood)
    distinct = float(np.mean([compute_distinct_share(text.continuation) for text in texts]))
    _log(run, model, {"repetition_step": steps.stop, "kl": change, "unlikelihood": unlikelihood, "distinct": distinct})


def _choose_prompts(run: RepetitionRun, steps: range) -> list[list[int]]:
    """Return the prompts of some steps, from the corpus. They depend on the first step alone."""
    rng = np.random.default_rng((run.recipe.seed, steps.start))
    count, (_, longest) = len(steps) * run.recipe.texts, run.recipe.prompt_tokens
    lengths = rng.integers(*run.recipe.prompt_tokens, count)
    offsets = rng.integers(0, len(run.ids) - longest, count)
    return [run.ids[at : at + n].astype(int).tolist() for at, n in zip(offsets, lengths, strict=True)]


def _add_corpus_gradient(model: Any, before: Any, batch: Tensor) -> float:
    """Add the gradient of KL(before || model) on windows [B, L + 1]; returns it, in nats per token."""
    total = 0.0
    for rows in torch.split(batch[:, :-1], MICRO_ROWS):
        with torch.no_grad():
            log_p = compute_logits(before, rows).float().log_softmax(-1)
        loss = kl(log_p, compute_logits(model, rows).float().log_softmax(-1)).mean() * (len(rows) / len(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _add_text_gradient(model: Any, texts: Sequence[GreedyText], weight: float, device: str) -> float:
    """Add `weight` times the gradient of the unlikelihood loss; returns the loss, in nats per generated token."""
    texts = sorted(texts, key=lambda text: len(text.prompt))  # rows of similar length need less padding
    count, total = sum(len(text.continuation) for text in texts), 0.0
    for start in range(0, len(texts), MICRO_ROWS):
        ids, mask = _pad(texts[start : start + MICRO_ROWS], device)
        log_p = compute_logits(model, ids[:, :-1]).float().log_softmax(-1)  # [B*L, V]
        p = log_p.gather(-1, ids[:, 1:].reshape(-1, 1)).exp().view(mask[:, 1:].shape)
        loss = -(torch.log1p(-p.clamp(max=MAX_PROBABILITY)) * mask[:, 1:]).sum() / count
        (weight * loss).backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total


def _pad(texts: Sequence[GreedyText], device: str) -> tuple[Tensor, Tensor]:
    """Return the token ids of texts, padded at the end, and which are repeated, both [B, L]."""
    width = max(len(text.prompt) + len(text.continuation) for text in texts)
    ids, mask = torch.zeros(len(texts), width, dtype=torch.long), torch.zeros(len(texts), width)
    for row, text in enumerate(texts):
        start, end = len(text.prompt), len(text.prompt) + len(text.continuation)
        ids[row, :end] = torch.tensor([*text.prompt, *text.continuation])
        mask[row, start:end] = torch.from_numpy(mark_repeats(text.continuation)).float()
    return ids.to(device), mask.to(device)


def _log(run: RepetitionRun, model: Any, row: dict[str, float]) -> None:
    step, per_measurement = row["repetition_step"], run.recipe.eval_every * run.recipe.steps_per_round
    if step % per_measurement == 0 or step == run.recipe.steps:
        model.eval()
        row = row | {"held_loss": measure_held_out_loss(model, run.held_out_ids, run.recipe.context, run.device)}
    with (run.folder / LOG_FILE).open("a") as log:
        log.write(json.dumps({key: round(value, 4) for key, value in row.items()}) + "\n")
