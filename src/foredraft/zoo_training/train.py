"""Training of the built-in pair: next-token loss for the target, distillation from the target for the draft model.

Weights and gradients are bf16, or fp32 where a CPU multiplies that faster; the optimizer's copies are fp32. Muon
updates matrices, AdamW the other parameters. The learning rate is constant until the last stage ends, then decays. The
decay has checkpoints of its own; it starts from the last checkpoint at the constant rate and does not change it.
Further cycles of the recipe follow the decay.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.drafters.losses import kl
from foredraft.errors import ForedraftError
from foredraft.train.checkpoint import TrainingCheckpoints
from foredraft.train.optimizer import LearningRateSchedule, MasterWeightOptimizer
from foredraft.train.stopping import handle_stop_signals
from foredraft.zoo_training.batches import WindowBatches
from foredraft.zoo_training.recipe import VOCAB_SIZE, LlamaRecipe

LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]  # (ids [B, L], logits [B*L, V], next ids [B*L])
StepLoss = Callable[[Tensor, Tensor], Tensor]  # (ids [B, L], next ids [B*L])
ProgressCallback = Callable[[int, int, float], None]  # (step, steps, smoothed loss)
PartProgressCallback = Callable[[str, int, int, float], None]  # (model name, step, steps, smoothed loss)
LOG_FILE = "log.jsonl"
LOG_EVERY = 20  # steps between lines of the log
EVAL_EVERY = 200  # steps between measurements of the held-out loss
DECAY_PREFIX = "decay-checkpoint-"
EVAL_WINDOWS = 16  # windows of a measurement of the held-out loss
HEAD_DIM = 64  # channels per attention head
MAX_GRAD_NORM = 1.0
OPTIMIZER = "muon"


def build_model(recipe: LlamaRecipe, layers: int, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """Return an untrained model with the recipe's width and `layers` layers."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=max(1024, recipe.long_context),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(config).to(dtype)


def stack_layers(recipe: LlamaRecipe, model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Return a model with `layers` layers that repeats the layers of `model` in order."""
    depth = model.config.num_hidden_layers
    if depth == layers:
        return model
    deeper = build_model(recipe, layers, model.dtype)
    deeper.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    deeper.model.norm.load_state_dict(model.model.norm.state_dict())
    for index, layer in enumerate(deeper.model.layers):
        layer.load_state_dict(model.model.layers[index % depth].state_dict())
    return deeper


def make_optimizer(recipe: LlamaRecipe, model: LlamaForCausalLM) -> MasterWeightOptimizer:
    """Return the optimizer of a model with the recipe's learning rate."""
    return MasterWeightOptimizer(OPTIMIZER, model, recipe.learning_rate)


def compute_logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Return the logits of token ids [B, L], as [B*L, V] in the dtype of the model."""
    hidden = model.model(ids, use_cache=False).last_hidden_state
    return model.lm_head(hidden).flatten(0, 1)  # type: ignore[no-any-return]


def compute_next_token_loss(ids: Tensor, logits: Tensor, next_ids: Tensor) -> Tensor:
    """Return the cross-entropy in nats per token, from logits [B*L, V] and next ids [B*L]."""
    return F.cross_entropy(logits.float(), next_ids)


def make_distillation_loss(target: LlamaForCausalLM) -> LossFunction:
    """Return the loss KL(p || q) of the target's p and the draft model's q, averaged over positions."""

    def loss(ids: Tensor, logits: Tensor, next_ids: Tensor) -> Tensor:
        with torch.no_grad():
            log_p = compute_logits(target, ids).float().log_softmax(-1)
        return kl(log_p, logits.float().log_softmax(-1)).mean()

    return loss


@dataclass(frozen=True)
class PretrainingRun:
    """Inputs, output folder and progress callback of a training run."""

    recipe: LlamaRecipe
    ids: np.ndarray
    folder: Path
    compute_loss: LossFunction = compute_next_token_loss
    device: str = "cpu"
    progress: ProgressCallback = lambda step, steps, loss: None
    held_out_ids: np.ndarray | None = None  # token ids whose loss is logged, [T]
    should_stop: Callable[[], bool] = lambda: False
    is_compiled: bool = False  # run steps through torch.compile, which needs a C++ compiler on CPU
    dtype: torch.dtype = torch.bfloat16  # of weights and gradients in training; the model is saved in bfloat16

    @property
    def checkpoints(self) -> TrainingCheckpoints:
        """Checkpoints at the constant learning rate."""
        return TrainingCheckpoints(self.folder)

    @property
    def decay_checkpoints(self) -> TrainingCheckpoints:
        return TrainingCheckpoints(self.folder, DECAY_PREFIX)


@dataclass
class PretrainingState:
    """State of a run, as a checkpoint stores it."""

    model: LlamaForCausalLM
    optimizer: MasterWeightOptimizer
    step: int = 0
    warmup_from: int = 0  # step of the last warm-up: the start, a change of the number of layers, or a further cycle
    decay_from: int | None = None  # step at which the decay of the cycle began; None = at the constant rate
    cycle: int = 0  # 0 = constant rate and its decay
    smoothed_loss: float = math.nan  # moving average of the training loss

    @property
    def num_layers(self) -> int:
        return int(self.model.config.num_hidden_layers)


def train(run: PretrainingRun, finish: bool = False) -> LlamaForCausalLM:
    """Train a model, from the run's checkpoint if there is one, and return it.

    The folder of the run gets a log, and at the end the model.

    Args:
        run: inputs, folder and callbacks.
        finish: begin the decay at the checkpoint, whatever its number of steps, and begin no further cycle. Default
            False.

    Raises:
        KeyboardInterrupt: a signal stopped the run; a checkpoint was saved.
        ForedraftError: the checkpoint was saved with another batch size.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with handle_stop_signals() as is_signalled:
        run = replace(run, should_stop=is_signalled)
        state = _load(run, run.decay_checkpoints)
        if state is None:
            state = _train_at_constant_rate(run, finish)
        _decay(run, state, state.cycle if finish else len(run.recipe.cycles))
    state.model.to(torch.bfloat16)
    state.model.save_pretrained(run.folder)
    run.decay_checkpoints.delete()
    return state.model


def _train_at_constant_rate(run: PretrainingRun, finish: bool) -> PretrainingState:
    recipe = run.recipe
    state = _load(run, run.checkpoints)
    if state is not None and finish:
        return state
    if state is None:
        model = build_model(recipe, recipe.stages[0].layers, run.dtype).to(run.device)
        state = PretrainingState(model, make_optimizer(recipe, model))
    end = 0
    for stage in recipe.stages:
        end += stage.steps
        if state.step < end:
            _deepen(run, state, stage.layers)
            _advance(run, state, stage.context, end, run.checkpoints)
    return state


def _decay(run: PretrainingRun, state: PretrainingState, last_cycle: int) -> None:
    """Run the decay after the constant rate, and the further cycles up to `last_cycle`."""
    if state.decay_from is None:
        _deepen(run, state, run.recipe.stages[-1].layers)
        state.decay_from = state.step
        _save(run, state, run.decay_checkpoints)
    _advance_decay(run, state, state.decay_from)
    while state.cycle < last_cycle:
        _start_cycle(run, state)
        _advance_decay(run, state, state.step)


def _advance_decay(run: PretrainingRun, state: PretrainingState, end: int) -> None:
    """Run the stages of a decay that began at step `end`."""
    for stage in run.recipe.find_decay_stages(state.cycle, end):
        end += stage.steps
        if state.step < end:
            _advance(run, state, stage.context, end, run.decay_checkpoints)


def _start_cycle(run: PretrainingRun, state: PretrainingState) -> None:
    """Begin the next cycle, with a new optimizer."""
    state.cycle += 1
    state.warmup_from = state.decay_from = state.step
    state.optimizer = make_optimizer(run.recipe, state.model)
    _save(run, state, run.decay_checkpoints)


def _deepen(run: PretrainingRun, state: PretrainingState, layers: int) -> None:
    """Add layers if the stage has more than the model; this resets the optimizer."""
    if state.num_layers < layers:
        state.model = stack_layers(run.recipe, state.model, layers).to(run.device)
        state.optimizer = make_optimizer(run.recipe, state.model)
        state.warmup_from = state.step


def make_schedule(
    recipe: LlamaRecipe, warmup_from: int, decay_from: int | None, cycle: int = 0
) -> LearningRateSchedule:
    """Return the schedule: warm-up after each change of depth, constant, linear decay to zero; cycles of the same."""
    if decay_from is None:
        return LearningRateSchedule(recipe.steps, recipe.warmup, "constant", warmup_from)
    end = decay_from + recipe.count_decay_steps(cycle, decay_from)
    return LearningRateSchedule(end, recipe.warmup, "linear", warmup_from, decay_from)


def _advance(
    run: PretrainingRun, state: PretrainingState, context: int, end: int, checkpoints: TrainingCheckpoints
) -> None:
    """Train with windows of `context` tokens up to step `end`."""
    recipe = run.recipe
    rows = recipe.batch_tokens // context
    batches = WindowBatches(run.ids, context, rows, recipe.seed + state.cycle, run.device)
    saved = began = time.monotonic()
    first = state.step
    compute_loss = _make_step_loss(run, state.model)
    while state.step < end:
        loss = _step(run, state, compute_loss, batches.get_batch(state.step))
        state.smoothed_loss = loss if math.isnan(state.smoothed_loss) else 0.95 * state.smoothed_loss + 0.05 * loss
        state.step += 1
        if state.step % LOG_EVERY == 0 or state.step == end:
            seconds = max(time.monotonic() - began, 1e-9)
            _log(run, state, round((state.step - first) * recipe.batch_tokens / seconds))
        is_stopped = run.should_stop()
        if is_stopped or state.step == end or time.monotonic() - saved >= recipe.checkpoint_seconds:
            _save(run, state, checkpoints)
            saved = time.monotonic()
        run.progress(state.step, _count_total_steps(recipe, state), state.smoothed_loss)
        if is_stopped:
            raise KeyboardInterrupt


def _count_total_steps(recipe: LlamaRecipe, state: PretrainingState) -> int:
    """Return the steps up to the end of the last cycle."""
    start = recipe.steps if state.decay_from is None else state.decay_from
    later = (stage for stages in recipe.cycles[state.cycle :] for stage in stages)
    return start + recipe.count_decay_steps(state.cycle, start) + sum(stage.steps for stage in later)


def _make_step_loss(run: PretrainingRun, model: LlamaForCausalLM) -> StepLoss:
    """Return the loss of a model as a function of token ids, compiled if the run is."""

    def compute(ids: Tensor, next_ids: Tensor) -> Tensor:
        return run.compute_loss(ids, compute_logits(model, ids), next_ids)

    return torch.compile(compute, dynamic=False) if run.is_compiled else compute


def _step(run: PretrainingRun, state: PretrainingState, compute_loss: StepLoss, batch: Tensor) -> float:
    """Make one update from a batch of token ids [rows, L + 1], and return the loss."""
    total = torch.zeros((), device=batch.device)
    for micro_batch in torch.split(batch, max(1, run.recipe.micro_tokens // (batch.shape[1] - 1))):
        ids, next_ids = micro_batch[:, :-1], micro_batch[:, 1:].flatten()
        loss = compute_loss(ids, next_ids)
        loss = loss * (len(micro_batch) / len(batch))
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    schedule = make_schedule(run.recipe, state.warmup_from, state.decay_from, state.cycle)
    state.optimizer.step(schedule.compute_scale(state.step), MAX_GRAD_NORM)
    return float(total)


def _log(run: PretrainingRun, state: PretrainingState, tokens_per_second: int) -> None:
    row: dict[str, float] = {
        "step": state.step,
        "tokens": state.step * run.recipe.batch_tokens,
        "layers": state.num_layers,
        "loss": round(state.smoothed_loss, 4),
        "tokens_per_s": tokens_per_second,
    }
    if state.decay_from is not None:
        row |= {"decay_from": state.decay_from, "cycle": state.cycle}
    if run.held_out_ids is not None and state.step % EVAL_EVERY == 0:
        row["held_loss"] = round(
            measure_held_out_loss(state.model, run.held_out_ids, run.recipe.stages[0].context, run.device), 4
        )
    with (run.folder / LOG_FILE).open("a") as log:
        log.write(json.dumps(row) + "\n")


@torch.no_grad()
def measure_held_out_loss(model: LlamaForCausalLM, held_out_ids: np.ndarray, context: int, device: str) -> float:
    """Return the next-token loss in nats over evenly spaced windows of `context` tokens of held-out token ids [T]."""
    losses = []
    for start in np.linspace(0, len(held_out_ids) - context - 1, EVAL_WINDOWS).astype(int):
        window = torch.from_numpy(held_out_ids[start : start + context + 1].astype(np.int64)).to(device)[None]
        losses.append(compute_next_token_loss(window, compute_logits(model, window[:, :-1]), window[0, 1:]))
    return float(torch.stack(losses).mean())


def _save(run: PretrainingRun, state: PretrainingState, checkpoints: TrainingCheckpoints) -> None:
    metadata = {
        "warmup_from": state.warmup_from,
        "decay_from": state.decay_from,
        "cycle": state.cycle,
        "loss": state.smoothed_loss,
        "layers": state.num_layers,
        "batch_tokens": run.recipe.batch_tokens,
    }
    checkpoints.save(state.step, {"model": state.model}, state.optimizer.state_dict(), metadata)


def _load(run: PretrainingRun, checkpoints: TrainingCheckpoints) -> PretrainingState | None:
    path = checkpoints.find_latest()
    if path is None:
        return None
    saved = checkpoints.read_state(path)
    if saved["batch_tokens"] != run.recipe.batch_tokens:
        raise ForedraftError(
            f"{path} was saved with batches of {saved['batch_tokens']} tokens; give --batch-tokens "
            f"{saved['batch_tokens']}, or another --out"
        )
    model = build_model(run.recipe, saved["layers"], run.dtype).to(run.device)
    checkpoints.load_weights(path, {"model": model})
    optimizer = make_optimizer(run.recipe, model)
    warmup_from = saved["warmup_from"]
    if checkpoints.has_optimizer(path):
        checkpoints.load_optimizer(path, optimizer)
    else:  # weights alone, without their optimizer: it begins anew, and the rate warms up again
        warmup_from = saved["step"]
    return PretrainingState(
        model, optimizer, saved["step"], warmup_from, saved["decay_from"], saved["cycle"], saved["loss"]
    )
