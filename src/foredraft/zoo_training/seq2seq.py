"""Training of the built-in encoder-decoder pair: T5 models that correct typing errors in English prose.

The target is trained on the clean passages, the draft model on the target's distributions. Typing errors are generated
again each time a passage is used.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

from foredraft.drafters.losses import kl
from foredraft.train.checkpoint import TrainingCheckpoints
from foredraft.train.optimizer import LearningRateSchedule, MasterWeightOptimizer
from foredraft.train.stopping import handle_stop_signals
from foredraft.zoo.typos import CLEAN_SHARE, WORD_ERROR_RATE, add_typos
from foredraft.zoo_training.recipe import END_OF_TEXT, VOCAB_SIZE
from foredraft.zoo_training.train import MAX_GRAD_NORM, OPTIMIZER, ProgressCallback

IGNORE_INDEX = -100  # target id of padding, ignored by the loss
BUCKET_TOKENS = 16  # width of a length bucket, in tokens; a batch has passages of one bucket
MAX_PASSAGE_TOKENS = 112  # longest passage, in tokens
BATCH_TOKENS = 4096  # tokens per batch, before padding
LOG_EVERY = 50  # steps between lines of the log
EVAL_EVERY = 500  # steps between measurements of the held-out loss


@dataclass(frozen=True)
class Seq2SeqRecipe:
    """Shape and training schedule of a T5 model; a head has hidden / heads channels."""

    hidden: int
    intermediate: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    steps: int
    learning_rate: float
    warmup: int = 100  # steps
    decay: float = 0.4  # share of the steps over which the learning rate falls to zero
    batch_tokens: int = BATCH_TOKENS
    seed: int = 0
    checkpoint_every: int = 100  # steps


SEQ2SEQ_RECIPE = Seq2SeqRecipe(
    hidden=192, intermediate=512, heads=3, encoder_layers=4, decoder_layers=6, steps=3000, learning_rate=2e-3
)
SEQ2SEQ_DRAFT_RECIPE = Seq2SeqRecipe(
    hidden=96, intermediate=192, heads=2, encoder_layers=2, decoder_layers=1, steps=2000, learning_rate=3e-3
)


def build_model(recipe: Seq2SeqRecipe, dtype: torch.dtype = torch.bfloat16) -> T5ForConditionalGeneration:
    """Return an untrained model. The decoder starts with the end-of-text id, as in BART."""
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
    """Return a copy of the tokenizer that appends the end-of-text id to every text, as in T5.

    The encoder reads the id as the end of its input.
    """
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.post_processor = processors.TemplateProcessing(
        single=f"$A {END_OF_TEXT}", pair=f"$A $B {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, 0)]
    )
    return copy


@dataclass(frozen=True)
class Seq2SeqBatch:
    """Padded batch of passages with errors and of clean passages; both end with the end-of-text id."""

    source: Tensor  # [B, S] ids
    mask: Tensor  # [B, S] bool, False for padding
    target: Tensor  # [B, L] ids, `IGNORE_INDEX` for padding

    def to(self, device: str) -> "Seq2SeqBatch":
        return Seq2SeqBatch(self.source.to(device), self.mask.to(device), self.target.to(device))

    @classmethod
    def from_texts(cls, tokenizer: Tokenizer, noisy: Sequence[str], clean: Sequence[str]) -> "Seq2SeqBatch":
        sources, targets = ([encoding.ids for encoding in tokenizer.encode_batch(list(s))] for s in (noisy, clean))
        source, target = _pad(sources, 0), _pad(targets, IGNORE_INDEX)
        lengths = torch.tensor([len(ids) for ids in sources])
        return cls(source, torch.arange(source.shape[1])[None] < lengths[:, None], target)


def _pad(rows: Sequence[list[int]], filler: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def make_batches(
    tokenizer: Tokenizer, passages: Sequence[str], tokens: int, seed: int, rate: float = WORD_ERROR_RATE
) -> Iterator[Seq2SeqBatch]:
    """Yield batches without end; the passages of a batch have similar lengths.

    Args:
        tokenizer: tokenizer of the models.
        passages: clean passages.
        tokens: approximate number of tokens per batch.
        seed: seed of the order and of the errors.
        rate: share of the words that get an error. Default 0.08.
    """
    rng = random.Random(seed)
    buckets: dict[int, list[str]] = {}
    for passage, encoding in zip(passages, tokenizer.encode_batch(list(passages)), strict=True):
        if len(encoding.ids) <= MAX_PASSAGE_TOKENS:
            buckets.setdefault(len(encoding.ids) // BUCKET_TOKENS, []).append(passage)
    sizes = [len(texts) * (bucket + 1) for bucket, texts in buckets.items()]
    while True:
        (bucket,) = rng.choices(list(buckets), sizes)
        clean = rng.choices(buckets[bucket], k=max(1, tokens // (BUCKET_TOKENS * (bucket + 1))))
        noisy = [text if rng.random() < CLEAN_SHARE else add_typos(text, rng, rate) for text in clean]
        yield Seq2SeqBatch.from_texts(tokenizer, noisy, clean)


def compute_logits(model: T5ForConditionalGeneration, batch: Seq2SeqBatch) -> Tensor:
    """Return the logits of the clean passages given their earlier tokens, [B*L, V] float32."""
    decoder_ids = F.pad(batch.target, (1, -1)).clamp_min(0)  # the target shifted by one, after the end-of-text id
    out = model(input_ids=batch.source, attention_mask=batch.mask, decoder_input_ids=decoder_ids, use_cache=False)
    return out.logits.flatten(0, 1).float()  # type: ignore[no-any-return]


Seq2SeqLoss = Callable[[Seq2SeqBatch, Tensor], Tensor]  # (batch, logits [B*L, V])


def compute_clean_loss(batch: Seq2SeqBatch, logits: Tensor) -> Tensor:
    """Return the cross-entropy of the clean passages in nats per token, from logits [B*L, V]."""
    return F.cross_entropy(logits, batch.target.flatten(), ignore_index=IGNORE_INDEX)


def make_distillation_loss(target: T5ForConditionalGeneration) -> Seq2SeqLoss:
    """Return the loss KL(p || q) of the target's p and the draft model's q, averaged over the clean tokens."""

    def loss(batch: Seq2SeqBatch, logits: Tensor) -> Tensor:
        is_token = batch.target.flatten() != IGNORE_INDEX
        with torch.no_grad():
            log_p = compute_logits(target, batch)[is_token].log_softmax(-1)
        return kl(log_p, logits[is_token].log_softmax(-1)).mean()

    return loss


@dataclass(frozen=True)
class Seq2SeqJob:
    """Inputs, output folder and progress callback of a training run."""

    recipe: Seq2SeqRecipe
    tokenizer: Tokenizer
    passages: Sequence[str]
    held_out: Sequence[str]
    folder: Path
    compute_loss: Seq2SeqLoss = compute_clean_loss
    device: str = "cpu"
    progress: ProgressCallback = lambda step, steps, loss: None
    dtype: torch.dtype = torch.bfloat16  # of weights and gradients in training; the model is saved in bfloat16

    @property
    def checkpoints(self) -> TrainingCheckpoints:
        return TrainingCheckpoints(self.folder)


def train(job: Seq2SeqJob) -> T5ForConditionalGeneration:
    """Train the model of a job, and return it.

    The job's folder gets log.jsonl, a checkpoint from which an interrupted run is resumed, and at the end the model.

    Raises:
        KeyboardInterrupt: a signal stopped the run; a checkpoint was saved.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    with handle_stop_signals() as is_signalled:
        model = _advance(job, is_signalled)
    model.to(torch.bfloat16).eval().config.dtype = "bfloat16"
    model.save_pretrained(job.folder)
    job.checkpoints.delete()
    return model


def _advance(job: Seq2SeqJob, is_signalled: Callable[[], bool]) -> T5ForConditionalGeneration:
    """Train from the job's last checkpoint to the last step."""
    recipe = job.recipe
    model = build_model(recipe, job.dtype).to(job.device).train()
    optimizer, schedule = MasterWeightOptimizer(OPTIMIZER, model, recipe.learning_rate), make_schedule(recipe)
    latest = job.checkpoints.find_latest()
    first = 0 if latest is None else int(job.checkpoints.load(latest, {"model": model}, optimizer)["step"])
    batches = make_batches(job.tokenizer, job.passages, recipe.batch_tokens, recipe.seed + first)
    smooth, began, tokens = math.nan, time.time(), 0
    for step in range(first, recipe.steps):
        batch = next(batches).to(job.device)
        loss = job.compute_loss(batch, compute_logits(model, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(schedule.compute_scale(step), MAX_GRAD_NORM)
        tokens += batch.target.numel()
        smooth = loss.item() if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss.item()
        if (step + 1) % LOG_EVERY == 0 or step + 1 == recipe.steps:
            row = {"step": step + 1, "loss": round(smooth, 4), "tokens_per_s": round(tokens / (time.time() - began))}
            if (step + 1) % EVAL_EVERY == 0 or step + 1 == recipe.steps:
                row |= evaluate(model, job)
            with (job.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
        is_stopped = is_signalled()
        if is_stopped or (step + 1) % recipe.checkpoint_every == 0 or step + 1 == recipe.steps:
            job.checkpoints.save(step + 1, {"model": model}, optimizer.state_dict(), {"loss": smooth})
        job.progress(step + 1, recipe.steps, smooth)
        if is_stopped:
            raise KeyboardInterrupt
    return model


def make_schedule(recipe: Seq2SeqRecipe) -> LearningRateSchedule:
    """Return the schedule: warm-up, constant, then a linear decay to zero."""
    decay_start = recipe.steps - round(recipe.decay * recipe.steps)
    return LearningRateSchedule(recipe.steps, recipe.warmup, "linear", decay_start=decay_start)


@torch.no_grad()
def evaluate(model: T5ForConditionalGeneration, job: Seq2SeqJob, batches: int = 20) -> dict[str, float]:
    """Measure a model on held-out passages; each token is predicted from the clean tokens before it.

    Args:
        model: model to measure.
        job: job with the tokenizer, the held-out passages and the device.
        batches: number of batches. Default 20.

    Returns:
        `held_loss` in nats per token, and `held_right`, the share of tokens predicted right.
    """
    figures = []
    for _, batch in zip(range(batches), make_batches(job.tokenizer, job.held_out, BATCH_TOKENS, seed=1), strict=False):
        moved = batch.to(job.device)
        logits, target = compute_logits(model, moved), moved.target.flatten()
        is_token = target != IGNORE_INDEX
        figures.append(
            [float(compute_clean_loss(moved, logits)), float((logits.argmax(-1) == target)[is_token].float().mean())]
        )
    loss, accuracy = torch.tensor(figures).mean(0).tolist()
    return {"held_loss": round(loss, 4), "held_right": round(accuracy, 4)}
