"""The built-in encoder-decoder pair: T5 models that undo typing errors, trained on prose of the standard library.

The target learns the clean passages, the draft the target's distributions. Errors are made anew for every passage and
pass.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

from foredraft.zoo.recipe import END_OF_TEXT, VOCAB_SIZE
from foredraft.zoo.train import MasterWeightOptimizer, ProgressCallback
from foredraft.zoo.typos import CLEAN_SHARE, WORD_ERROR_RATE, add_typos

IGNORE_INDEX = -100
BUCKET_TOKENS = 16  # tokens: passages of one batch are about as long as each other
MAX_PASSAGE_TOKENS = 112  # tokens of a passage
BATCH_TOKENS = 4096  # of a batch, before padding


@dataclass(frozen=True)
class Seq2SeqRecipe:
    """d_kv is hidden / heads."""

    hidden: int
    intermediate: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    steps: int
    learning_rate: float
    warmup: int = 100
    decay: float = 0.4  # share of all steps over which the rate falls to zero
    batch_tokens: int = BATCH_TOKENS
    seed: int = 0
    checkpoint_every: int = 100


SEQ2SEQ_RECIPE = Seq2SeqRecipe(hidden=192, intermediate=512, heads=3, encoder_layers=4, decoder_layers=6, steps=3000,
                        learning_rate=2e-3)  # fmt: skip
SEQ2SEQ_DRAFT_RECIPE = Seq2SeqRecipe(hidden=96, intermediate=192, heads=2, encoder_layers=2, decoder_layers=1,
steps=2000,
                              learning_rate=3e-3)  # fmt: skip


def build_model(recipe: Seq2SeqRecipe, dtype: torch.dtype = torch.bfloat16) -> T5ForConditionalGeneration:
    """An untrained model. The end of a text begins the decoder's, as in BART."""
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=recipe.hidden,
        d_kv=recipe.hidden // recipe.heads,
        d_ff=recipe.intermediate,
        num_layers=recipe.encoder_layers,
        num_decoder_layers=recipe.decoder_layers,
        num_heads=recipe.heads,
        dropout_rate=0.0,
        feed_forward_proj="relu",
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=0,
    )
    torch.manual_seed(recipe.seed)
    return T5ForConditionalGeneration(config).to(dtype)


def append_end_token(tokenizer: Tokenizer) -> Tokenizer:
    """The built-in tokenizer with the end of the text after every text, as T5 has it: an encoder sees where it is."""
    same = Tokenizer.from_str(tokenizer.to_str())
    same.post_processor = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", pair=f"$A $B {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, 0)]
    )
    return same


@dataclass(frozen=True)
class Seq2SeqBatch:
    """A batch. Both sides end with the end of the text."""

    source: Tensor  # [B, S] ids
    mask: Tensor  # [B, S] bool
    target: Tensor  # [B, L] ids, IGNORED pads

    def to(self, device: str) -> "Seq2SeqBatch":
        return Seq2SeqBatch(self.source.to(device), self.mask.to(device), self.target.to(device))

    @classmethod
    def from_texts(cls, tokenizer: Tokenizer, wrong: Sequence[str], right: Sequence[str]) -> "Seq2SeqBatch":
        sources, targets = ([encoding.ids for encoding in tokenizer.encode_batch(list(s))] for s in (wrong, right))
        source, target = _pad(sources, 0), _pad(targets, IGNORE_INDEX)
        lengths = torch.tensor([len(ids) for ids in sources])
        return cls(source, torch.arange(source.shape[1])[None] < lengths[:, None], target)


def _pad(rows: Sequence[list[int]], filler: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def make_batches(
    tokenizer: Tokenizer, passages: Sequence[str], tokens: int, seed: int, rate: float = WORD_ERROR_RATE
) -> Iterator[Seq2SeqBatch]:
    """Batches of about `tokens` tokens without end, each of passages of like length."""
    rng = random.Random(seed)
    buckets: dict[int, list[str]] = {}
    for passage, encoding in zip(passages, tokenizer.encode_batch(list(passages)), strict=True):
        if len(encoding.ids) <= MAX_PASSAGE_TOKENS:
            buckets.setdefault(len(encoding.ids) // BUCKET_TOKENS, []).append(passage)
    sizes = [len(texts) * (bucket + 1) for bucket, texts in buckets.items()]
    while True:
        (bucket,) = rng.choices(list(buckets), sizes)
        right = rng.choices(buckets[bucket], k=max(1, tokens // (BUCKET_TOKENS * (bucket + 1))))
        wrong = [text if rng.random() < CLEAN_SHARE else add_typos(text, rng, rate) for text in right]
        yield Seq2SeqBatch.from_texts(tokenizer, wrong, right)


def compute_logits(model: T5ForConditionalGeneration, batch: Seq2SeqBatch) -> Tensor:
    """[B*L, V]"""
    begun = F.pad(batch.target, (1, -1)).clamp_min(0)  # the end of a text, then what is to be said
    out = model(input_ids=batch.source, attention_mask=batch.mask, decoder_input_ids=begun, use_cache=False)
    return out.logits.flatten(0, 1).float()  # type: ignore[no-any-return]


Seq2SeqLoss = Callable[[Seq2SeqBatch, Tensor], Tensor]  # (batch, logits [B*L, V])


def compute_clean_loss(batch: Seq2SeqBatch, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, batch.target.flatten(), ignore_index=IGNORE_INDEX)


def make_distillation_loss(target: T5ForConditionalGeneration) -> Seq2SeqLoss:
    """KL(p || q) from the target's p to the draft's q, averaged over the positions of the clean passage."""

    def loss(batch: Seq2SeqBatch, logits: Tensor) -> Tensor:
        kept = batch.target.flatten() != IGNORE_INDEX
        with torch.no_grad():
            p = compute_logits(target, batch)[kept].softmax(-1)
            entropy = -(p * p.clamp_min(1e-9).log()).sum(-1).mean()
        return F.cross_entropy(logits[kept], p) - entropy

    return loss


@dataclass(frozen=True)
class Seq2SeqJob:
    """Inputs, output folder and progress callback of a run."""

    recipe: Seq2SeqRecipe
    tokenizer: Tokenizer
    passages: Sequence[str]
    held_out: Sequence[str]
    folder: Path
    compute_loss: Seq2SeqLoss = compute_clean_loss
    device: str = "cpu"
    progress: ProgressCallback = lambda step, steps, loss: None

    @property
    def checkpoint_path(self) -> Path:
        return self.folder / "checkpoint.pt"


def train(job: Seq2SeqJob) -> T5ForConditionalGeneration:
    """Run the recipe; the folder holds a checkpoint to resume from, log.jsonl, and at the end the model."""
    recipe = job.recipe
    job.folder.mkdir(parents=True, exist_ok=True)
    model = build_model(recipe).to(job.device).train()
    optimizer = MasterWeightOptimizer(model, recipe.learning_rate)
    done = _resume(job, model, optimizer)
    batches = make_batches(job.tokenizer, job.passages, recipe.batch_tokens, recipe.seed + done)
    smooth, began, tokens = math.nan, time.time(), 0
    for step in range(done, recipe.steps):
        batch = next(batches).to(job.device)
        loss = job.compute_loss(batch, compute_logits(model, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(compute_rate_scale(recipe, step))
        tokens += batch.target.numel()
        smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
        if step % 50 == 49 or step + 1 == recipe.steps:
            row = {"step": step + 1, "loss": round(smooth, 4), "tokens_per_s": round(tokens / (time.time() - began))}
            if step % 500 == 499 or step + 1 == recipe.steps:
                row |= evaluate(model, job)
            with (job.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
        if (step + 1) % recipe.checkpoint_every == 0 or step + 1 == recipe.steps:
            _save(job, step + 1, model, optimizer)
        job.progress(step + 1, recipe.steps, smooth)
    model.eval().config.dtype = "bfloat16"
    model.save_pretrained(job.folder)
    job.checkpoint_path.unlink(missing_ok=True)
    return model


def compute_rate_scale(recipe: Seq2SeqRecipe, step: int) -> float:
    """Warm-up, level, then a linear fall to zero, as a share of the learning rate."""
    left = (recipe.steps - step) / (recipe.decay * recipe.steps)
    return min(1.0, (step + 1) / recipe.warmup, left)


@torch.no_grad()
def evaluate(model: T5ForConditionalGeneration, job: Seq2SeqJob, batches: int = 20) -> dict[str, float]:
    """On held-out passages, the clean text before every place given: loss, and share of places guessed right."""
    found = []
    for _, batch in zip(range(batches), make_batches(job.tokenizer, job.held_out, BATCH_TOKENS, seed=1), strict=False):
        there = batch.to(job.device)
        logits, wanted = compute_logits(model, there), there.target.flatten()
        kept = wanted != IGNORE_INDEX
        found.append(
            [float(compute_clean_loss(there, logits)), float((logits.argmax(-1) == wanted)[kept].float().mean())]
        )
    loss, right = torch.tensor(found).mean(0).tolist()
    return {"held_loss": round(loss, 4), "held_right": round(right, 4)}


def _resume(job: Seq2SeqJob, model: Any, optimizer: MasterWeightOptimizer) -> int:
    if not job.checkpoint_path.exists():
        return 0
    saved = torch.load(job.checkpoint_path, weights_only=True, map_location=job.device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _save(job: Seq2SeqJob, step: int, model: Any, optimizer: MasterWeightOptimizer) -> None:
    partial = job.checkpoint_path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    partial.replace(job.checkpoint_path)
