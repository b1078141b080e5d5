"""EAGLE (2401.15077) with the dynamic tree of EAGLE-2 (2406.16858): a decoder layer over the target's last states.

Position t reads the embedding of token t + 1 and the target's state h_t after the final norm. The output approximates
h_{t+1}, and the target's own output matrix turns it into logits. `FeatureDrafter` does the drafting.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.layouts import make_layout
from foredraft.checkpoints.schema import Checkpoint, EagleShape
from foredraft.drafters.feature_drafter import FeatureDrafter, make_feature_lm
from foredraft.drafters.losses import Losses, Trace, average_over_mask, check_loss, compute_draft_loss
from foredraft.drafters.registry import DrafterContext
from foredraft.drafters.target_access import (
    bind_to_target,
    derive_block_shape,
    get_packed_head,
    init_as_identity,
    load_checkpoint,
    require_target,
)
from foredraft.drafters.training_time_test import UnrolledStep, average_step_losses, unroll
from foredraft.drafters.tree_builder import TreeOptions as Config
from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import AttentionFunction, DraftLayer, RotaryEmbedding
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.models.native.draft_layers import JoinedInput, NativeDraftLayers, get_obstacle

__all__ = ["METHOD", "Config", "TrainConfig", "create", "create_trainee"]

METHOD = "eagle"
AUTO_RANK = 50  # among the methods with a model, measured on the built-in target; higher is better


class EagleNetwork(nn.Module):
    """Draft network of EAGLE. Its state dict has the names of published checkpoints."""

    def __init__(self, shape: EagleShape, target: HFModel) -> None:
        super().__init__()
        hidden = shape.block.hidden
        self.shape = shape
        self.target = (target,)  # in a tuple, so that its weights are not registered here
        self.fc = nn.Linear(2 * hidden, hidden, bias=shape.has_fc_bias)
        self.layers = nn.ModuleList(DraftLayer(shape.block, has_input_norm=i > 0) for i in range(shape.num_layers))
        self.rotary = RotaryEmbedding(shape.block)
        if shape.has_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)  # `bind_to_target` chooses between the two
        self.embedding = target.embedding  # [V, H]

    def project_features(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        embedded = F.embedding(tokens, self.embedding).to(features.dtype)
        x = self.fc(torch.cat([embedded, features], -1))
        rotary = self.rotary(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, i, attend, x if i == 0 else None)  # layer 0 has no input norm
        return x, x

    def compute_logits(self, states: Tensor) -> Tensor:
        return self.target[0].compute_logits(states.to(self.embedding.dtype))


def create(config: Config, context: DrafterContext) -> FeatureDrafter:
    """Load the head and make its drafter.

    Raises:
        ForedraftError: for invalid tree options, or a head of another method or another target.
    """
    config.to_tree_spec(context.num_speculative_tokens)  # report invalid options before the checkpoint is loaded
    return from_checkpoint(config, load_checkpoint(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> FeatureDrafter:
    """Make the drafter of a loaded head for `context.target`."""
    network = _load_network(checkpoint, require_target(context))
    bind_to_target(network, checkpoint.folder, context)
    return FeatureDrafter(
        make_feature_lm(network, _make_native, context),
        (AFTER_FINAL_NORM,),
        config.to_tree_spec(context.num_speculative_tokens),
        context,
    )


def _load_network(checkpoint: Checkpoint, target: HFModel) -> EagleNetwork:
    if not isinstance(checkpoint.shape, EagleShape):
        raise ForedraftError(f"{checkpoint.folder} holds no EAGLE head but {checkpoint.format}")
    network = EagleNetwork(checkpoint.shape, target)
    network.load_state_dict(checkpoint.tensors)
    return network


def _make_native(network: EagleNetwork) -> NativeDraftLayers | None:
    head = get_packed_head(network.target[0])
    layers, embedding = list(network.layers), network.embedding
    if head is None or get_obstacle(layers, embedding) is not None:
        return None
    block, rotary = network.shape.block, network.rotary
    return NativeDraftLayers.from_layers(layers, JoinedInput(network.fc), None, False, embedding, head, block, rotary)


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: loss of the logits against the target's distribution, one of `losses.LOSS_NAMES`.
        regression: weight of the smooth L1 distance between outputs and the target's states; 0 = off.
        noise: half-width of the uniform noise on input states (2401.15077, section 4); 0 = off.
        steps: depth of drafts on the network's own outputs (HASS, 2408.15766); 1 = EAGLE's recipe.
        decay: weight of step k is decay^k, in (0, 1].
        num_layers: decoder layers of the head.
        has_fc_bias: whether the input projection has a bias.
    """

    loss: str = "kl"
    regression: float = 1.0
    noise: float = 0.1
    steps: int = 1
    decay: float = 0.9
    num_layers: int = 1
    has_fc_bias: bool = False


@dataclass(frozen=True)
class EagleTrainee:
    """EAGLE head in training, on a frozen target."""

    config: TrainConfig
    network: EagleNetwork
    hidden_layers: tuple[int, ...] = (AFTER_FINAL_NORM,)

    def compute_loss(self, trace: Trace) -> Losses:
        first = trace.features.to(self.network.fc.weight.dtype)
        if self.config.noise:
            first = first + (torch.rand_like(first) * 2 - 1) * self.config.noise
        total, step_losses = average_step_losses(
            unroll(self.network, trace, first, self.config.steps), self._compute_step_loss, self.config.decay
        )
        return Losses(total, step_losses)

    def _compute_step_loss(self, step: UnrolledStep) -> Tensor:
        loss = compute_draft_loss(
            self.config.loss, step.logits, step.trace.target_log_probs.select(step.target_rows), step.tokens
        )
        if self.config.regression:
            true = step.true_features.to(step.features.dtype)
            distance = F.smooth_l1_loss(step.features, true, reduction="none").mean(-1)
            loss = loss + self.config.regression * distance
        return average_over_mask(loss, step.mask)

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and config.json in the layout of the authors."""
        layout = make_layout(self.network.shape, self.network.state_dict())
        return layout.tensors, layout.config | {"base_model_name_or_path": self.network.target[0].name}


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> EagleTrainee:
    """Make a head to train, in float32.

    Args:
        config: training settings.
        target: frozen target.
        start: checkpoint to continue from; None = a new head that outputs its input state.

    Raises:
        ForedraftError: for invalid settings, or a checkpoint of another method.
    """
    check_loss(config.loss)
    if config.steps < 1 or config.num_layers < 1 or not 0 < config.decay <= 1:
        raise ForedraftError("steps and num_layers must be positive, and decay must lie in 0..1")
    if config.noise < 0 or config.regression < 0:
        raise ForedraftError("noise and regression must not be negative; 0 turns them off")
    if start is not None:
        return EagleTrainee(config, _load_network(start, target).float().to(target.device))
    shape = EagleShape(derive_block_shape(target), target.vocab_size, config.num_layers, config.has_fc_bias)
    network = EagleNetwork(shape, target).to(target.device)
    init_as_identity(network.fc, network.layers)
    return EagleTrainee(config, network)
