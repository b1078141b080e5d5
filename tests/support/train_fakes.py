"""A drafter small enough to train in a test, and texts for it."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.drafters.losses import Losses, Trace, average_over_mask, check_loss, compute_draft_loss
from foredraft.drafters.method import Method, Training
from foredraft.drafters.trainee import TraineeSpec
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.train.config import DataConfig, EvaluationConfig, OptimizationConfig, TrainPlan


@dataclass(frozen=True)
class TrainConfig:
    loss: str = "ce"
    dropout: float = 0.0
    taps: tuple[int, ...] = (AFTER_FINAL_NORM,)
    scale: float | None = None


class LinearTrainee:
    """One matrix that predicts the next token from the target's last state."""

    def __init__(self, config: TrainConfig, width: int, vocab_size: int) -> None:
        check_loss(config.loss)
        self.config, self.spec = config, TraineeSpec(config.taps)
        self.network = nn.Sequential(nn.Dropout(config.dropout), nn.Linear(width, vocab_size))

    def compute_loss(self, trace: Trace) -> Losses:
        logits = self.network(trace.features.float())
        total = average_over_mask(
            compute_draft_loss(self.config.loss, logits, trace.target_log_probs, trace.tokens[:, 1:]), trace.mask[:, 1:]
        )
        return Losses(total, {"twice": 2 * float(total.detach())})

    def to_checkpoint(self):
        tensors = {name: x.detach() for name, x in self.network.state_dict().items()}
        return CheckpointLayout("linear", tensors, {"kind": "linear"})


def create_trainee(config, target, start=None):
    return LinearTrainee(config, target.hidden_size * len(config.taps), target.vocab_size)


def make_method(config, create_trainee) -> Method:
    """A method that is only trained."""
    return Method("linear", SimpleNamespace, create=SimpleNamespace, training=Training(config, create_trainee))


LINEAR = make_method(TrainConfig, create_trainee)


def write_ids(folder: Path, num_texts: int = 12, length: int = 50, vocab_size: int = 97, name: str = "ids.npy") -> str:
    """Texts of random tokens, each after the id that ends a text."""
    rng = np.random.default_rng(0)
    texts = [[3, *(4 + rng.integers(0, vocab_size - 4, length))] for _ in range(num_texts)]
    np.save(folder / name, np.concatenate(texts).astype(np.uint16))
    return str(folder / name)


def plan(folder: Path, out: str = "out", settings=None, **more) -> TrainPlan:
    steps = {"steps": 6, "batch_tokens": 64, "learning_rate": 1e-2}
    data = {"files": (str(folder / "ids.npy"),), "context": 16}
    asked = {name: more.pop(name) for name in list(more) if name in OptimizationConfig.__dataclass_fields__}
    data_fields = {name: more.pop(name) for name in list(more) if name in DataConfig.__dataclass_fields__}
    return TrainPlan(
        method="fake", model=str(folder / "model"), out=folder / out, settings=settings,
        data=DataConfig(**{**data, **data_fields}), steps=OptimizationConfig(**{**steps, **asked}),
        **{"evaluation": EvaluationConfig(prompts=0), "precision": "fp32", "device": "cpu", **more},
    )  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
