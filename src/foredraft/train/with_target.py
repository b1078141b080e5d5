"""Joint training of the target and its heads: a trainable copy of the target is kept close to the original.

The heads warm up first, while the target is frozen. Then both learn: the heads from the current states, the target at
a small rate from its own loss, by default the divergence from its original distribution, so that its output changes
little. Reference: Medusa-2, 2401.10774, section 2.2.2.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.joint_training import JointTraining
from foredraft.drafters.losses import Losses, Trace, average_over_mask, compute_draft_loss
from foredraft.drafters.trainee import Trainee
from foredraft.files.disk import convert_write_errors, replace_files
from foredraft.llm import LLM
from foredraft.models.native.decoder import explain_unsupported
from foredraft.train.publish import DISK_FULL_HINT
from foredraft.train.trainable_target import TrainableTarget

TARGET_FOLDER = "target"  # subfolder of the heads' folder


@dataclass(frozen=True)
class JointLoss:
    """Loss of the heads and the target together."""

    trainee: Trainee
    target: TrainableTarget
    joint: JointTraining

    def __call__(self, trace: Trace, progress: float) -> Losses:
        if progress < self.joint.warmup:
            return self.trainee.compute_loss(trace)
        logits, states = self.target.forward(trace.tokens[:, :-1])
        head_losses = self.trainee.compute_loss(Trace(trace.tokens, states, trace.target_log_probs, trace.mask))
        own_loss = _average_loss(self.joint.loss, logits, trace)
        total = own_loss + self.joint.heads_weight * head_losses.total
        return Losses(total, {**head_losses.components, "target": float(own_loss.detach())})

    @torch.no_grad()
    def measure_target(self, traces: Iterable[Trace]) -> dict[str, float]:
        """Measure the target in training on traces of the original one.

        Returns:
            `target_kl`, the divergence from the original distribution, and `target_ce`, the loss on the text, in nats
            per token to learn; {} without traces.
        """
        sums, num_learnt = {"target_kl": 0.0, "target_ce": 0.0}, 0.0
        for trace in traces:
            logits, count = self.target.forward(trace.tokens[:, :-1])[0], float(trace.mask[:, 1:].sum())
            for key in sums:
                sums[key] += count * float(_average_loss(key.removeprefix("target_"), logits, trace))
            num_learnt += count
        return {key: round(total / num_learnt, 5) for key, total in sums.items()} if num_learnt else {}


def _average_loss(name: str, logits: Tensor, trace: Trace) -> Tensor:
    """Average the loss of logits [B, L, V] of the next tokens over the tokens to learn."""
    loss = compute_draft_loss(name, logits, trace.target_log_probs, trace.tokens[:, 1:])
    return average_over_mask(loss, trace.mask[:, 1:])


def save_target(model: Any, folder: Path, tokenizer: Any) -> None:
    """Write a trained target as a model folder inside the folder of its heads."""

    def write(path: Path) -> None:
        model.save_pretrained(path)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)

    with convert_write_errors(folder / TARGET_FOLDER, DISK_FULL_HINT):
        replace_files(folder / TARGET_FOLDER, write)


def make_llm(model: Any, tokenizer: Any) -> LLM:
    """Make an LLM with a trained target, native if its architecture is supported."""
    is_native = model.device.type == "cpu" and explain_unsupported(model) is None
    return LLM(model, None, tokenizer=tokenizer, fused=True if is_native else None)
