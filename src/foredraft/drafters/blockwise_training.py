"""Training blockwise heads on a frozen target (1811.03115, section 6)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.checkpoints.base import BlockwiseShape, Checkpoint
from foredraft.checkpoints.layouts import layout
from foredraft.drafters.blockwise_network import BlockwiseHeads
from foredraft.drafters.newest_training import answers, asked, mean_loss
from foredraft.drafters.training import Losses, Trace, check_loss
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel
from foredraft.models.window import NORMED

EACH_STEP = ("all", "one")


@dataclass(frozen=True)
class TrainConfig:
    """`inner`: width of the hidden layer for each head, None = the target's. `heads_per_step`: every step learns from
    "all" heads, their mean loss, or from "one" of them drawn anew, which the paper does to save memory and which is the
    same on average. `decay`: head h's loss counts decay^h, 1 = the paper's plain mean."""

    loss: str = "kl"
    heads: int = 4
    inner: int | None = None
    heads_per_step: str = "all"
    decay: float = 1.0


class BlockwiseTrainee:
    """Heads while they learn: head h at position i is asked for token i + 2 + h."""

    taps: tuple[int, ...] = (NORMED,)

    def __init__(self, network: BlockwiseHeads, target: HFModel, config: TrainConfig) -> None:
        self.network = network
        self.target = target
        self.config = config

    def loss(self, trace: Trace) -> Losses:
        weights = [self.config.decay**head for head in range(self.network.shape.num_heads)]
        if self.config.heads_per_step == "one" and self.network.training:
            head = int(torch.multinomial(torch.tensor(weights), 1))
            return Losses(self._loss(trace, head), {})  # no parts: the processes of a run draw different heads
        losses = [self._loss(trace, head) for head in range(len(weights))]
        total = torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)
        return Losses(total, {f"loss_{head + 1}": float(loss.detach()) for head, loss in enumerate(losses)})

    def _loss(self, trace: Trace, head: int) -> Tensor:
        rows = asked(trace, head + 1)
        law, tokens = answers(trace, rows, head + 1)
        logits_of, states = partial(self.logits, head), trace.features[rows]
        return mean_loss(self.config.loss, logits_of, states, law, tokens, self.network.shape.vocab_size)

    def logits(self, head: int, states: Tensor) -> Tensor:
        """[R, H] -> [R, V]"""
        x = self.network(states.to(self.network.hidden.weight.dtype), head)
        return self.target.head(x.to(self.target.model.dtype))

    def published(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """In the layout of `checkpoints.blockwise`."""
        made = layout(self.network.shape, self.network.state_dict())
        return made.tensors, made.config | {"base_model_name_or_path": self.target.name}


def trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> BlockwiseTrainee:
    """Heads to train on a target, in float32: new ones guess what the target's own head would, or those of `start`."""
    check_loss(config.loss)
    if config.heads_per_step not in EACH_STEP:
        raise ForedraftError(f"heads_per_step is {' or '.join(EACH_STEP)}, got {config.heads_per_step!r}")
    if not 0 < config.decay <= 1:
        raise ForedraftError(f"decay must lie in 0..1, got {config.decay}")
    if start is not None:
        if not isinstance(start.shape, BlockwiseShape):
            raise ForedraftError(f"{start.folder} holds no blockwise heads but {start.format}; it cannot be trained on")
        network = BlockwiseHeads(start.shape).float()
        network.load_state_dict(start.tensors)
        return BlockwiseTrainee(network.to(target.device), target, config)
    inner = target.hidden_size if config.inner is None else config.inner
    if config.heads < 1 or inner < 1:
        raise ForedraftError(f"heads and inner must be positive, got {config.heads} and {inner}")
    shape = BlockwiseShape(target.hidden_size, target.vocab_size, config.heads, config.heads * inner)
    network = BlockwiseHeads(shape).float()
    nn.init.zeros_(network.output.weight)
    nn.init.zeros_(network.output.bias)
    return BlockwiseTrainee(network.to(target.device), target, config)
