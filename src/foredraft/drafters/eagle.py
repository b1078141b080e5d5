"""EAGLE (2401.15077) with the dynamic tree of EAGLE-2 (2406.16858): a decoder layer over the target's hidden states.

"Head" is the trained part: the input projection and the decoder layers, one by default. "lm_head" is the output matrix,
which belongs to the target.

At position t the network reads the embedding of token t + 1 and h_t, the target's hidden state after its final norm at
token t. Its output approximates h_{t+1}. The target's output matrix (lm_head) turns it into logits for token t + 2.
This file has the network, its loading and its training; `FeatureDrafter` drafts with it.
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
    get_packed_lm_head,
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
from foredraft.models.native.draft_layers import JoinedInput, NativeDraftLayers, explain_unsupported

__all__ = ["METHOD", "Config", "TrainConfig", "create", "create_trainee"]

METHOD = "eagle"
AUTO_RANK = 50  # preference of `auto` among methods with a model, by speed on the built-in target; higher is better


class EagleNetwork(nn.Module):
    """Draft network of EAGLE. The names in its state dict are those of published checkpoints.

    Args:
        shape: sizes of the network.
        target: target whose embedding and output matrix the network uses.
    """

    def __init__(self, shape: EagleShape, target: HFModel) -> None:
        super().__init__()
        hidden = shape.block.hidden
        self.shape = shape
        self.target = (target,)  # in a tuple, so that nn.Module does not register the target's weights
        self.fc = nn.Linear(2 * hidden, hidden, bias=shape.has_fc_bias)
        self.layers = nn.ModuleList(DraftLayer(shape.block, has_input_norm=i > 0) for i in range(shape.num_layers))
        self.rotary = RotaryEmbedding(shape.block)
        # Some checkpoints have an embedding. `bind_to_target` sets `embedding` to it, unless it has nothing in common
        # with the target's: some published files contain an untrained one (`choose_embedding`).
        if shape.has_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)
        self.embedding = target.embedding  # [V, H]

    def project_features(self, features: Tensor) -> Tensor:
        """Return the features [.., H] unchanged: one hidden layer of the target has the width of the network."""
        return features

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """Predict the next features.

        Args:
            tokens: [B, L] tokens t + 1.
            features: [B, L, H] features t: states of the target, or outputs of this network.
            positions: [B, L] positions t, for the rotary embedding.
            attend: attention function: causal in training, over the KV pool when the network drafts.

        Returns:
            States for `compute_logits` and next features, which are the same tensor [B, L, H] here.
        """
        embedded = F.embedding(tokens, self.embedding).to(features.dtype)
        x = self.fc(torch.cat([embedded, features], -1))
        rotary = self.rotary(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            # Layer 0 has no input norm, so its attention reads x. None lets a layer apply its own input norm.
            x = layer(x, rotary, i, attend, attention_input=x if i == 0 else None)
        return x, x

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the target's logits [.., V] of states [.., H]."""
        return self.target[0].compute_logits(states.to(self.embedding.dtype))


def create(config: Config, context: DrafterContext) -> FeatureDrafter:
    """Load the head and make its drafter.

    Raises:
        ForedraftError: for invalid tree options, or a head of another method, or one that does not fit the target.
    """
    config.to_tree_spec(context.num_speculative_tokens)  # raises for invalid options before the checkpoint is loaded
    return from_checkpoint(config, load_checkpoint(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> FeatureDrafter:
    """Make a drafter for `context.target` from a loaded head."""
    network = _load_network(checkpoint, require_target(context))
    bind_to_target(network, checkpoint.folder, context)
    return FeatureDrafter(
        make_feature_lm(network, _make_native, context),
        (AFTER_FINAL_NORM,),
        config.to_tree_spec(context.num_speculative_tokens),
        context,
    )


def _load_network(checkpoint: Checkpoint, target: HFModel) -> EagleNetwork:
    """Make a network with the tensors of a checkpoint. Raises ForedraftError for a head of another method."""
    if not isinstance(checkpoint.shape, EagleShape):
        raise ForedraftError(f"{checkpoint.folder} holds no EAGLE head but {checkpoint.format}")
    network = EagleNetwork(checkpoint.shape, target)
    network.load_state_dict(checkpoint.tensors)
    return network


def _make_native(network: EagleNetwork) -> NativeDraftLayers | None:
    """Convert the network to native CPU code; None if the target or a layer is not supported."""
    lm_head = get_packed_lm_head(network.target[0])
    layers, embedding = list(network.layers), network.embedding
    if lm_head is None or explain_unsupported(layers, embedding) is not None:
        return None
    return NativeDraftLayers.from_layers(
        layers,
        JoinedInput(network.fc),
        norm=None,  # no norm before the output matrix (lm_head)
        has_normed_output=False,  # the next feature is the state before a norm
        embedding=embedding,
        lm_head=lm_head,
        shape=network.shape.block,
        rotary=network.rotary,
    )


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: loss of the logits against the target's distribution, one of `losses.LOSS_NAMES`.
        regression: weight of the smooth L1 distance between outputs and the target's hidden states; 0 = off.
        noise: half-width of the uniform noise that is added to input features (2401.15077, section 4); 0 = off.
        steps: number of unrolled steps (`training_time_test.py`). Step 0 reads features of the target, as in EAGLE.
            Each later step reads the outputs of the one before (HASS, 2408.15766).
        decay: the loss of unrolled step k has the weight decay^k; in (0, 1].
        num_layers: decoder layers of the head. A checkpoint to start from determines it.
        has_fc_bias: whether the input projection has a bias. A checkpoint to start from determines it.
    """

    loss: str = "kl"
    regression: float = 1.0
    noise: float = 0.1
    steps: int = 1
    decay: float = 0.9
    num_layers: int = 1
    has_fc_bias: bool = False

    @staticmethod
    def read_shape(network: EagleNetwork) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines, with their values."""
        shape = network.shape
        return {"num_layers": shape.num_layers, "has_fc_bias": shape.has_fc_bias}


@dataclass(frozen=True)
class EagleTrainee:
    """EAGLE head in training, on a frozen target. Implements `Trainee`."""

    config: TrainConfig
    network: EagleNetwork
    hidden_layers: tuple[int, ...] = (AFTER_FINAL_NORM,)

    def compute_loss(self, trace: Trace) -> Losses:
        """Return the mean of the losses of the simulated steps with weights decay^k.

        Args:
            trace: training sequences with the recorded outputs of the target.
        """
        features = trace.features.to(self.network.fc.weight.dtype)
        if self.config.noise:
            features = features + (torch.rand_like(features) * 2 - 1) * self.config.noise
        total, step_losses = average_step_losses(
            unroll(self.network, trace, features, self.config.steps), self._compute_step_loss, self.config.decay
        )
        return Losses(total, step_losses)

    def _compute_step_loss(self, step: UnrolledStep) -> Tensor:
        """Return the loss of one simulated step: that of the logits, and the distance of the predicted features."""
        loss = compute_draft_loss(
            self.config.loss, step.logits, step.trace.target_log_probs.select(step.target_rows), step.tokens
        )
        if self.config.regression:
            target_features = step.true_features.to(step.features.dtype)
            distance = F.smooth_l1_loss(step.features, target_features, reduction="none").mean(-1)
            loss = loss + self.config.regression * distance
        return average_over_mask(loss, step.mask)

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors by name and the contents of config.json, in the format of EAGLE's authors."""
        layout = make_layout(self.network.shape, self.network.state_dict())
        return layout.tensors, layout.config | {"base_model_name_or_path": self.network.target[0].name}


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> EagleTrainee:
    """Make a head to train, in float32.

    Args:
        config: training settings.
        target: target, which is not trained.
        start: checkpoint to continue from, which determines the shape of the head; None = a new head, which at first
            outputs its input feature.

    Raises:
        ForedraftError: for invalid settings, or a checkpoint of another method.
    """
    check_loss(config.loss)
    if config.steps < 1 or config.num_layers < 1 or not 0 < config.decay <= 1:
        raise ForedraftError("steps and num_layers must be positive, and decay must be above 0 and at most 1")
    if config.noise < 0 or config.regression < 0:
        raise ForedraftError("noise and regression must not be negative; 0 turns them off")
    if start is not None:
        return EagleTrainee(config, _load_network(start, target).float().to(target.device))
    shape = EagleShape(derive_block_shape(target), target.vocab_size, config.num_layers, config.has_fc_bias)
    network = EagleNetwork(shape, target).to(target.device)
    init_as_identity(network.fc, network.layers)
    return EagleTrainee(config, network)
