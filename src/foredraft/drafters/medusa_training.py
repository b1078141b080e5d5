"""Training Medusa's heads: Medusa-1 with the target frozen, Medusa-2 together with it (2401.10774, section 2.2)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.base import Checkpoint, MedusaShape
from foredraft.checkpoints.layouts import layout
from foredraft.drafters.medusa_heads import RANKS, MedusaHeads
from foredraft.drafters.newest_training import answers, asked, choice, mean_loss
from foredraft.drafters.training import Losses, Trace, check_loss
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel
from foredraft.models.window import NORMED


@dataclass(frozen=True)
class TrainConfig:
    """`own_head`: every head has an output matrix, a copy of the target's to begin with; without, the target's serves
    all, which drafts faster and takes a tenth of the memory. `decay`: head h's loss counts decay^h. `backbone`:
    learning rate of the target as a share of the heads', for Medusa-2; None = frozen, Medusa-1."""

    loss: str = "kl"
    heads: int = 4
    layers: int = 1
    own_head: bool = True
    decay: float = 0.8
    backbone: float | None = None


class MedusaTrainee:
    """Heads while they learn: head h at position i is asked for token i + 2 + h."""

    taps: tuple[int, ...] = (NORMED,)

    def __init__(self, network: MedusaHeads, target: HFModel, config: TrainConfig) -> None:
        self.network = network
        self.target = target
        self.config = config
        self.backbone = config.backbone
        self.accuracies = network.shape.accuracies

    def loss(self, trace: Trace) -> Losses:
        total, weight, parts = trace.features.new_zeros(()).float(), 0.0, {}
        for head in range(len(self.network)):
            rows = asked(trace, head + 1)
            law, tokens = answers(trace, rows, head + 1)
            logits_of, states = partial(self.logits, head), trace.features[rows]
            loss = mean_loss(self.config.loss, logits_of, states, law, tokens, self.network.shape.vocab_size)
            total, weight = total + self.config.decay**head * loss, weight + self.config.decay**head
            parts[f"loss_{head + 1}"] = float(loss.detach())
        return Losses(total / weight, parts)

    @torch.no_grad()
    def finish(self, traces: Iterable[Trace]) -> None:
        """Measure how often each guess of each head is the target's greedy choice; trees are built from that."""
        hits = torch.zeros(len(self.network), RANKS, dtype=torch.int64)
        counts = torch.zeros(len(self.network), 1, dtype=torch.int64)
        for trace in traces:
            for head in range(len(self.network)):
                rows = asked(trace, head + 1)
                law, _ = answers(trace, rows, head + 1)
                logits = self.logits(head, trace.features[rows])
                guesses = logits.topk(min(RANKS, logits.shape[-1]), -1).indices
                hits[head, : guesses.shape[1]] += (guesses == choice(law)[:, None]).sum(0).cpu()
                counts[head] += len(guesses)
        rates = (hits / counts.clamp_min(1)).tolist()
        self.accuracies = tuple(tuple(round(rate, 4) for rate in row) for row in rates)

    def logits(self, head: int, states: Tensor) -> Tensor:
        """[R, H] -> [R, V]"""
        x = self.network(states.to(self._dtype), head)
        if self.network.shape.has_own_head:
            return x  # type: ignore[no-any-return]
        return self.target.head(x.to(self.target.model.dtype))

    def published(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As FasterDecoding has it; with the accuracies measured, which no other engine reads."""
        made = layout(replace(self.network.shape, accuracies=self.accuracies), self.network.state_dict())
        return made.tensors, made.config | {"base_model_name_or_path": self.target.name}

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.network.parameters()).dtype


def trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> MedusaTrainee:
    """Heads to train on a target, in float32: new ones guess what the target's own head would, or those of `start`."""
    check_loss(config.loss)
    if start is not None:
        if not isinstance(start.shape, MedusaShape):
            raise ForedraftError(f"{start.folder} holds no Medusa heads but {start.format}; it cannot be trained on")
        network = MedusaHeads(start.shape).float()
        network.load_state_dict(start.tensors)
        return MedusaTrainee(network.to(target.device), target, config)
    if config.heads < 1 or config.layers < 1:
        raise ForedraftError(f"heads and layers must be positive, got {config.heads} and {config.layers}")
    if config.backbone is not None and not config.own_head:
        raise ForedraftError("a target that learns too changes its head under those that borrow it; use own_head")
    if not 0 < config.decay <= 1:
        raise ForedraftError(f"decay must lie in 0..1, got {config.decay}")
    shape = MedusaShape(target.hidden_size, target.vocab_size, config.heads, config.layers, config.own_head)
    network = MedusaHeads(shape).float()
    weight = target.head_weight.float()
    scaling = getattr(target.model.config.get_text_config(), "logits_scaling", None) or 1.0
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if ".linear." in name:
                parameter.zero_()
            else:
                parameter.copy_(weight / scaling)
    return MedusaTrainee(network.to(target.device), target, config)
