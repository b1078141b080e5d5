"""Joint training of the target and its heads: a trainable copy of the target is kept close to the original.

The heads warm up first, while the target is frozen. Then both learn: the heads from the current states, the target at
a small rate from its own loss, by default the divergence from its original distribution, so that its output changes
little. Reference: Medusa-2, 2401.10774, section 2.2.2.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.drafters.joint_training import JointTraining
from foredraft.drafters.losses import Losses, Trace
from foredraft.drafters.trainee import Trainee
from foredraft.files.disk import convert_write_errors, replace_files
from foredraft.llm import LLM
from foredraft.models.native.decoder import explain_unsupported
from foredraft.train.publish import DISK_FULL_HINT
from foredraft.train.trainable_target import TrainableTarget, average_loss

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
        own_loss = average_loss(self.joint.loss, logits, trace)
        total = own_loss + self.joint.heads_weight * head_losses.total
        return Losses(total, {**head_losses.components, "target": float(own_loss.detach())})


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
