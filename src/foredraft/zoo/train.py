"""Training of the built-in pair: next-token loss for the target, the target's law for the draft.

Weights and gradients are bf16, the optimizer's copies fp32. Matrices are updated by Muon, the rest by AdamW.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.zoo.recipe import VOCAB_SIZE, Recipe, Stage

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (ids [B, L], logits [B*L, V], next ids [B*L])
Progress = Callable[[int, int, float], None]  # (step, steps, smoothed loss)
Report = Callable[[str, int, int, float], None]  # the same, after the part's name
_OUTER = ("embed", "shared", "relative_attention_bias")  # matrices that are tables: Muon is not meant for them


def build(recipe: Recipe, layers: int, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """An untrained model of the recipe's width and the given depth."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(config).to(dtype)


def stacked(recipe: Recipe, model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """The model at a greater depth, its layers repeated in order."""
    depth = model.config.num_hidden_layers
    if depth == layers:
        return model
    deeper = build(recipe, layers)
    deeper.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deeper.model.norm.load_state_dict(model.model.norm.state_dict())
    for index, layer in enumerate(deeper.model.layers):
        layer.load_state_dict(model.model.layers[index % depth].state_dict())
    return deeper


class Optimizer:
    """fp32 copies of bf16 parameters, Muon for the matrices inside layers and AdamW for the rest."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.pairs = [(p, nn.Parameter(p.detach().float())) for p in model.parameters()]
        inner = [p.ndim == 2 and not any(word in name for word in _OUTER) for name, p in model.named_parameters()]
        matrices = [m for is_inner, (_, m) in zip(inner, self.pairs, strict=True) if is_inner]
        others = [m for is_inner, (_, m) in zip(inner, self.pairs, strict=True) if not is_inner]
        self.learning_rate = learning_rate
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, scale: float) -> None:
        """One update at `scale` times the learning rate; gradients are cleared."""
        for parameter, master in self.pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        nn.utils.clip_grad_norm_([master for _, master in self.pairs], 1.0)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.learning_rate * scale
            part.step()
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)

    def state_dict(self) -> dict[str, object]:
        return {"parts": [p.state_dict() for p in self.parts], "masters": [m.detach() for _, m in self.pairs]}

    def load_state_dict(self, state: dict) -> None:  # type: ignore[type-arg]
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        with torch.no_grad():
            for (_, master), saved in zip(self.pairs, state["masters"], strict=True):
                master.copy_(saved)


def windows(ids: np.ndarray, context: int, rows: int, seed: int) -> Iterator[Tensor]:
    """[rows, context + 1] batches without end: each pass over the corpus cuts it at a fresh offset."""
    rng = np.random.default_rng(seed)
    while True:
        offset = int(rng.integers(context))
        starts = rng.permutation(np.arange(offset, len(ids) - context - 1, context))
        for i in range(0, len(starts) - rows + 1, rows):
            batch = np.stack([ids[s : s + context + 1] for s in starts[i : i + rows]])
            yield torch.from_numpy(batch.astype(np.int64))


def rate(recipe: Recipe, step: int) -> float:
    """Warm-up, level, then a linear fall to zero, as a share of the learning rate."""
    left = (recipe.steps - step) / (recipe.decay * recipe.steps)
    return min(1.0, (step + 1) / recipe.warmup, left)


def logits_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """[B*L, V] logits in the model's dtype."""
    hidden = model.model(ids, use_cache=False).last_hidden_state
    return model.lm_head(hidden).flatten(0, 1)  # type: ignore[no-any-return]


def next_token_loss(ids: Tensor, logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), following)


def distillation_loss(target: LlamaForCausalLM) -> Loss:
    """KL(p || q) from the target's law p to the draft's q, averaged over positions."""

    def loss(ids: Tensor, logits: Tensor, following: Tensor) -> Tensor:
        with torch.no_grad():
            p = logits_of(target, ids).float().softmax(-1)
            entropy = -(p * p.clamp_min(1e-9).log()).sum(-1).mean()
        return F.cross_entropy(logits.float(), p) - entropy

    return loss


@dataclass(frozen=True)
class Run:
    """Where a training run reads, writes and reports."""

    recipe: Recipe
    ids: np.ndarray
    folder: Path
    loss_of: Loss
    device: str
    progress: Progress

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"


def train(
    recipe: Recipe,
    ids: np.ndarray,
    folder: Path,
    loss_of: Loss = next_token_loss,
    device: str = "cpu",
    progress: Progress = lambda step, steps, loss: None,
) -> LlamaForCausalLM:
    """Run the recipe; `folder` holds a checkpoint to resume from and log.jsonl, and at the end the model."""
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(recipe, ids, folder, loss_of, device, progress)
    done, model = 0, build(recipe, recipe.stages[0].layers).to(device)
    for stage in recipe.stages:
        model = stacked(recipe, model, stage.layers).to(device)
        done = _run_stage(run, stage, done, model)
    model.config.dtype = "bfloat16"
    model.save_pretrained(folder)
    run.checkpoint.unlink(missing_ok=True)
    return model


def _resume(run: Run, stage: Stage, first: int, model: LlamaForCausalLM, optimizer: Optimizer) -> int:
    """Load what a checkpoint holds of this stage; the step to go on from."""
    if not run.checkpoint.exists():
        return first
    saved = torch.load(run.checkpoint, weights_only=True, map_location=run.device)
    end = first + stage.steps
    if saved["step"] < first or (saved["step"] <= end and saved["layers"] != stage.layers):
        return first
    if saved["step"] <= end:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    return min(int(saved["step"]), end)


def _save(run: Run, step: int, stage: Stage, model: LlamaForCausalLM, optimizer: Optimizer) -> None:
    partial = run.checkpoint.with_suffix(".tmp")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"step": step, "layers": stage.layers, **state}, partial)
    partial.replace(run.checkpoint)


def _run_stage(run: Run, stage: Stage, first: int, model: LlamaForCausalLM) -> int:
    recipe, end = run.recipe, first + stage.steps
    optimizer = Optimizer(model, recipe.learning_rate)
    done = _resume(run, stage, first, model, optimizer)
    batches = windows(run.ids, stage.context, recipe.batch_tokens // stage.context, recipe.seed + first)
    for _ in range(done - first):
        next(batches)
    smooth, began = math.nan, time.time()
    for step in range(done, end):
        batch = next(batches).to(run.device)
        loss = run.loss_of(batch[:, :-1], logits_of(model, batch[:, :-1]), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(rate(recipe, step))
        smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
        if step % 20 == 19 or step + 1 == end:
            speed = (step + 1 - done) * recipe.batch_tokens / (time.time() - began)
            row = {"step": step + 1, "loss": round(smooth, 4), "tokens_per_s": round(speed)}
            with (run.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
        if (step + 1) % recipe.checkpoint_every == 0 or step + 1 == end:
            _save(run, step + 1, stage, model, optimizer)
        run.progress(step + 1, recipe.steps, smooth)
    return end
