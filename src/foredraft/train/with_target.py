"""Joint training of the target and its heads: a trainable copy of the target is kept close to the original.

The heads warm up first, while the target is frozen. Then both learn: the heads from the current states, the target at
a small rate from its own loss, the divergence from its original distribution, so that its output changes little.
Reference: Medusa-2, 2401.10774.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.drafters.losses import Losses, Trace, average_over_mask, compute_draft_loss
from foredraft.drafters.trainee import JointTraining, Trainee
from foredraft.files.disk import convert_write_errors, replace_files
from foredraft.llm import LLM
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.models.hidden_states import find_decoder_layers
from foredraft.models.loading import load_model
from foredraft.models.native.decoder import explain_unsupported
from foredraft.train.publish import DISK_FULL_HINT

TARGET_FOLDER = "target"  # subfolder of the heads' folder
WARMUP_SHARE = 0.2  # share of the steps, if the trainee sets no number of warm-up steps


@dataclass(frozen=True)
class TrainableTarget:
    """Copy of the target as a module with gradients."""

    model: Any
    hidden_layers: tuple[int, ...]

    @classmethod
    def from_model(cls, target: HFModel, hidden_layers: Sequence[int]) -> "TrainableTarget":
        """Load the weights again in float32: the weights that serve requests are packed."""
        model = load_model(target.name, torch.float32, target.device)
        model.set_attn_implementation("sdpa")
        return cls(model.train(), tuple(hidden_layers))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, L, V] and hidden states [B, L, F] at the hidden layers."""
        states: dict[int, Tensor] = {}
        handles = [self._register_hook(layer, states) for layer in self.hidden_layers]
        try:
            logits = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        return logits, torch.cat([states[layer] for layer in self.hidden_layers], -1)

    def _register_hook(self, layer: int, states: dict[int, Tensor]) -> Any:
        """Register a hook that records one layer boundary, numbered as in HFModel.forward."""
        if layer == 0:
            return find_decoder_layers(self.model)[0].register_forward_pre_hook(
                _make_input_hook(states), with_kwargs=True
            )
        module = self.model.get_decoder() if layer == AFTER_FINAL_NORM else find_decoder_layers(self.model)[layer - 1]
        return module.register_forward_hook(_make_output_hook(states, layer))


def _make_input_hook(states: dict[int, Tensor]) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        states[0] = args[0] if args else kwargs["hidden_states"]

    return hook


def _make_output_hook(states: dict[int, Tensor], layer: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        states[layer] = output if isinstance(output, Tensor) else output[0]

    return hook


@dataclass(frozen=True)
class JointLoss:
    """Loss of the heads and the target together."""

    trainee: Trainee
    target: TrainableTarget
    target_loss: str  # name of the target's loss: a divergence from its original distribution, or ce
    warmup_steps: int  # steps in which only the heads learn
    rate: float  # learning rate of the target as a share of the heads'

    @classmethod
    def make(cls, trainee: Trainee, joint: JointTraining, target: HFModel, num_steps: int) -> "JointLoss":
        """Make the loss of a run of `num_steps` steps, with a new trainable copy of the target."""
        warmup_steps = round(WARMUP_SHARE * num_steps) if joint.warmup_steps is None else joint.warmup_steps
        trainable = TrainableTarget.from_model(target, trainee.spec.hidden_layers)
        return cls(trainee, trainable, joint.loss, warmup_steps, joint.rate)

    def __call__(self, trace: Trace, step: int) -> Losses:
        if step < self.warmup_steps:
            return self.trainee.compute_loss(trace)
        logits, states = self.target.forward(trace.tokens[:, :-1])
        head_losses = self.trainee.compute_loss(Trace(trace.tokens, states, trace.target_log_probs, trace.mask))
        own_loss = average_over_mask(
            compute_draft_loss(self.target_loss, logits, trace.target_log_probs, trace.tokens[:, 1:]), trace.mask[:, 1:]
        )
        return Losses(head_losses.total + own_loss, {**head_losses.components, "target": float(own_loss.detach())})

    def save(self, folder: Path, dtype: torch.dtype, tokenizer: Any) -> None:
        """Write the trained target as a model folder."""
        model = copy.deepcopy(self.target.model).to(dtype)

        def write(path: Path) -> None:
            model.save_pretrained(path)
            if tokenizer is not None:
                tokenizer.save_pretrained(path)

        with convert_write_errors(folder / TARGET_FOLDER, DISK_FULL_HINT):
            replace_files(folder / TARGET_FOLDER, write)

    def make_llm(self, dtype: torch.dtype, tokenizer: Any) -> LLM:
        """Make an LLM with the target in its current state."""
        model = copy.deepcopy(self.target.model).to(dtype).eval()
        is_native = model.device.type == "cpu" and explain_unsupported(model) is None
        return LLM(model, None, tokenizer=tokenizer, fused=True if is_native else None)
