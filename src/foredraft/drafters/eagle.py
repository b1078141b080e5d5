"""EAGLE (2401.15077) and its dynamic tree, EAGLE-2 (2406.16858): one decoder layer over the target's last states.

It reads the embedding of token t + 1 beside the state h_t that led to it, and its output stands for h_{t+1}: the
target's own head makes logits of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.base import Checkpoint, EagleShape
from foredraft.checkpoints.layouts import layout
from foredraft.drafters.base import Context
from foredraft.drafters.borrowed import block_like, lender, loaded, packed_head, pass_through, settle
from foredraft.drafters.growth import TreeOptions as Config
from foredraft.drafters.recurrent import FeatureDrafter, feature_lm
from foredraft.drafters.training import Losses, Trace, check_loss, draft_loss, mean
from foredraft.drafters.unrolled import Step, unroll, weighted
from foredraft.errors import ForedraftError
from foredraft.models.block import Attend, Layer, Rotary
from foredraft.models.fused_features import FusedFeatures, Joined, why_not
from foredraft.models.lm import HFModel
from foredraft.models.window import NORMED

__all__ = ["METHOD", "Config", "TrainConfig", "create", "trainee"]

METHOD = "eagle"
AUTO_RANK = 50  # among the methods that read a model, as measured on the built-in target


class EagleNetwork(nn.Module):
    """State-dict names are those of a published checkpoint."""

    def __init__(self, shape: EagleShape, target: HFModel) -> None:
        super().__init__()
        hidden = shape.block.hidden
        self.shape = shape
        self.target = (target,)  # a tuple: its weights are none of ours
        self.fc = nn.Linear(2 * hidden, hidden, bias=shape.has_fc_bias)
        self.layers = nn.ModuleList(Layer(shape.block, has_input_norm=i > 0) for i in range(shape.num_layers))
        self.rotary = Rotary(shape.block)
        if shape.has_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)
        self.embedding = target.embedding  # [V, H]

    def taken(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(tokens, self.embedding).to(features.dtype)
        x = self.fc(torch.cat([embedded, features], -1))
        turn = self.rotary(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, i, attend, x if i == 0 else None)
        return x, x

    def logits(self, states: Tensor) -> Tensor:
        return self.target[0].head(states.to(self.embedding.dtype))


def create(config: Config, context: Context) -> FeatureDrafter:
    """Raises ForedraftError for a head of another kind or another target."""
    config.plan(context.num_tokens)  # options that make none are refused before anything is loaded
    return from_checkpoint(config, loaded(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: Context) -> FeatureDrafter:
    """From a head that is loaded, beside context.target."""
    network = _network(checkpoint, lender(context))
    settle(network, checkpoint.folder, context)
    return FeatureDrafter(feature_lm(network, _fused, context), (NORMED,), config.plan(context.num_tokens), context)


def _network(checkpoint: Checkpoint, target: HFModel) -> EagleNetwork:
    if not isinstance(checkpoint.shape, EagleShape):
        raise ForedraftError(f"{checkpoint.folder} holds no EAGLE head but {checkpoint.format}")
    network = EagleNetwork(checkpoint.shape, target)
    network.load_state_dict(checkpoint.tensors)
    return network


def _fused(network: EagleNetwork) -> FusedFeatures | None:
    head = packed_head(network.target[0])
    layers, embedding = list(network.layers), network.embedding
    if head is None or why_not(layers, embedding) is not None:
        return None
    block, rotary = network.shape.block, network.rotary
    return FusedFeatures.of(layers, Joined(network.fc), None, False, embedding, head, block, rotary)


@dataclass(frozen=True)
class TrainConfig:
    """`loss` of the logits against the target's law; `regression`: weight of the smooth L1 distance between outputs and
    the states they stand for; `noise`: half-width of what is added to the states read (2401.15077, section 4);
    `steps`: how many tokens deep it drafts on its own outputs while it learns (2408.15766), 1 = EAGLE's own recipe;
    `decay`: weight of each further step."""

    loss: str = "kl"
    regression: float = 1.0
    noise: float = 0.1
    steps: int = 1
    decay: float = 0.9
    num_layers: int = 1
    has_fc_bias: bool = False


@dataclass(frozen=True)
class EagleTrainee:
    config: TrainConfig
    network: EagleNetwork
    taps: tuple[int, ...] = (NORMED,)

    def loss(self, trace: Trace) -> Losses:
        first = trace.features.to(self.network.fc.weight.dtype)
        if self.config.noise:
            first = first + (torch.rand_like(first) * 2 - 1) * self.config.noise
        total, parts = weighted(unroll(self.network, trace, first, self.config.steps), self._loss, self.config.decay)
        return Losses(total, parts)

    def _loss(self, step: Step) -> Tensor:
        loss = draft_loss(self.config.loss, step.logits, step.trace.law.at(step.law_rows), step.tokens)
        if self.config.regression:
            true = step.true_features.to(step.features.dtype)
            distance = F.smooth_l1_loss(step.features, true, reduction="none").mean(-1)
            loss = loss + self.config.regression * distance
        return mean(loss, step.mask)

    def published(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """In the layout of its authors."""
        made = layout(self.network.shape, self.network.state_dict())
        return made.tensors, made.config | {"base_model_name_or_path": self.network.target[0].name}


def trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> EagleTrainee:
    """A new head for a target, or one to go on with. Raises ForedraftError for options that make none."""
    check_loss(config.loss)
    if config.steps < 1 or config.num_layers < 1 or not 0 < config.decay <= 1:
        raise ForedraftError("steps and num_layers must be positive, and decay lie in 0..1")
    if config.noise < 0 or config.regression < 0:
        raise ForedraftError("noise and regression are no less than 0; 0 leaves them out")
    if start is not None:
        return EagleTrainee(config, _network(start, target).float().to(target.device))
    shape = EagleShape(block_like(target), target.vocab_size, config.num_layers, config.has_fc_bias)
    network = EagleNetwork(shape, target).to(target.device)
    pass_through(network.fc, network.layers)
    return EagleTrainee(config, network)
