"""A drafter small enough to train in a test, and texts for it."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from foredraft.drafters.training import Losses, Trace, check_loss, draft_loss, mean
from foredraft.models.window import NORMED
from foredraft.train.plan import Data, Evaluation, Plan, Steps


@dataclass(frozen=True)
class TrainConfig:
    loss: str = "ce"
    dropout: float = 0.0
    taps: tuple[int, ...] = (NORMED,)
    scale: float | None = None


class Linear:
    """One matrix that guesses the next token from the target's last state."""

    def __init__(self, config: TrainConfig, width: int, vocab_size: int) -> None:
        check_loss(config.loss)
        self.config, self.taps = config, config.taps
        self.network = nn.Sequential(nn.Dropout(config.dropout), nn.Linear(width, vocab_size))

    def loss(self, trace: Trace) -> Losses:
        logits = self.network(trace.features.float())
        total = mean(draft_loss(self.config.loss, logits, trace.law, trace.tokens[:, 1:]), trace.mask[:, 1:])
        return Losses(total, {"twice": 2 * float(total.detach())})

    def published(self):
        return {name: x.detach() for name, x in self.network.state_dict().items()}, {"kind": "linear"}


def trainee(config, target, start=None):
    return Linear(config, target.hidden_size * len(config.taps), target.vocab_size)


MODULE = SimpleNamespace(TrainConfig=TrainConfig, trainee=trainee)


def write_ids(folder: Path, num_texts: int = 12, length: int = 50, vocab_size: int = 97, name: str = "ids.npy") -> str:
    """Texts of random tokens, each after the id that ends a text."""
    rng = np.random.default_rng(0)
    texts = [[3, *(4 + rng.integers(0, vocab_size - 4, length))] for _ in range(num_texts)]
    np.save(folder / name, np.concatenate(texts).astype(np.uint16))
    return str(folder / name)


def plan(folder: Path, out: str = "out", settings=None, **more) -> Plan:
    steps = {"steps": 6, "batch_tokens": 64, "learning_rate": 1e-2}
    data = {"files": (str(folder / "ids.npy"),), "context": 16}
    asked = {name: more.pop(name) for name in list(more) if name in Steps.__dataclass_fields__}
    told = {name: more.pop(name) for name in list(more) if name in Data.__dataclass_fields__}
    return Plan(
        method="fake", model=str(folder / "model"), out=folder / out, settings=settings,
        data=Data(**{**data, **told}), steps=Steps(**{**steps, **asked}),
        **{"evaluation": Evaluation(prompts=0), "precision": "fp32", "device": "cpu", **more},
    )  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
