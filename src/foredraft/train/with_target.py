"""The target learning together with its heads (Medusa-2, 2401.10774): a live copy of it, held close to what it was.

The heads warm up first, on a target that does not move. Then both learn: the heads on the live states, the target at a
small rate on its own loss, the divergence from its old distribution, so that its output changes little.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foredraft import LLM
from foredraft.checkpoints.disk import convert_write_errors, replace_files
from foredraft.drafters.losses import Losses, Trace, Trainee, average_over_mask, compute_draft_loss
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel, find_decoder_layers
from foredraft.models.loading import load_model
from foredraft.models.native.decoder import get_obstacle
from foredraft.train.publish import DISK_FULL_HINT

TARGET_FOLDER = "target"  # beside the heads
WARMUP_SHARE = 0.2  # share of the steps, where the trainee does not say


@dataclass(frozen=True)
class TrainableTarget:
    """The target as a module that takes gradients."""

    model: Any
    hidden_layers: tuple[int, ...]

    @classmethod
    def from_model(cls, target: HFModel, hidden_layers: Sequence[int]) -> "TrainableTarget":
        """Its weights once more, in float32: those that serve are packed."""
        model = load_model(target.name, torch.float32, target.device)
        model.set_attn_implementation("sdpa")
        return cls(model.train(), tuple(hidden_layers))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, L, V] and states [B, L, F] at the taps."""
        found: dict[int, Tensor] = {}
        handles = [self._register_hook(tap, found) for tap in self.hidden_layers]
        try:
            logits = self.model(input_ids=tokens, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        return logits, torch.cat([found[tap] for tap in self.hidden_layers], -1)

    def _register_hook(self, layer: int, found: dict[int, Tensor]) -> Any:
        """Boundaries are counted as in HFModel.forward."""
        if layer == 0:
            return find_decoder_layers(self.model)[0].register_forward_pre_hook(
                _make_input_hook(found), with_kwargs=True
            )
        module = self.model.get_decoder() if layer == AFTER_FINAL_NORM else find_decoder_layers(self.model)[layer - 1]
        return module.register_forward_hook(_make_output_hook(found, layer))


def _make_input_hook(found: dict[int, Tensor]) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        found[0] = args[0] if args else kwargs["hidden_states"]

    return hook


def _make_output_hook(found: dict[int, Tensor], layer: int) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found[layer] = output if isinstance(output, Tensor) else output[0]

    return hook


@dataclass(frozen=True)
class JointLoss:
    """The loss of heads and target together."""

    trainee: Trainee
    target: TrainableTarget
    target_loss: str  # of the target: a divergence from its old distribution, or ce
    warmup_steps: int  # steps in which only the heads learn

    def __call__(self, trace: Trace, step: int) -> Losses:
        if step < self.warmup_steps:
            return self.trainee.compute_loss(trace)
        logits, states = self.target.forward(trace.tokens[:, :-1])
        heads = self.trainee.compute_loss(Trace(trace.tokens, states, trace.target_log_probs, trace.mask))
        own = average_over_mask(
            compute_draft_loss(self.target_loss, logits, trace.target_log_probs, trace.tokens[:, 1:]), trace.mask[:, 1:]
        )
        return Losses(heads.total + own, {**heads.components, "target": float(own.detach())})

    def save(self, folder: Path, dtype: torch.dtype, tokenizer: Any) -> None:
        """The tuned target, as a model folder."""
        model = copy.deepcopy(self.target.model).to(dtype)

        def write(place: Path) -> None:
            model.save_pretrained(place)
            if tokenizer is not None:
                tokenizer.save_pretrained(place)

        with convert_write_errors(folder / TARGET_FOLDER, DISK_FULL_HINT):
            replace_files(folder / TARGET_FOLDER, write)

    def make_llm(self, dtype: torch.dtype, tokenizer: Any) -> LLM:
        """Make an LLM with the target in its current state."""
        model = copy.deepcopy(self.target.model).to(dtype).eval()
        is_native = model.device.type == "cpu" and get_obstacle(model) is None
        return LLM(model, None, tokenizer=tokenizer, fused=True if is_native else None)
