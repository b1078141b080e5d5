"""Training of an EAGLE head."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.target_access import (
    derive_block_shape,
    init_as_identity,
)
from foredraft.drafters.common.training_time_test import UnrolledStep, average_step_losses, unroll
from foredraft.drafters.eagle.checkpoint import EagleShape, make_layout
from foredraft.drafters.eagle.network import EagleNetwork, load_network
from foredraft.drafters.losses import Losses, Trace, average_over_mask, check_loss, compute_draft_loss
from foredraft.drafters.trainee import TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: loss of the logits against the target's distribution, one of `losses.LOSS_NAMES`.
        regression: weight of the smooth L1 distance between outputs and the target's hidden states; 0 = off.
        noise: half-width of the uniform noise that is added to input features (2401.15077, section 4); 0 = off.
        steps: number of unrolled steps (training-time test). Step 0 reads features of the target, as in EAGLE.
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

    @property
    def spec(self) -> TraineeSpec:
        return TraineeSpec(hidden_layers=(AFTER_FINAL_NORM,))

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
        return EagleTrainee(config, load_network(start, target).float().to(target.device))
    shape = EagleShape(derive_block_shape(target), target.vocab_size, config.num_layers, config.has_fc_bias)
    network = EagleNetwork(shape, target).to(target.device)
    init_as_identity(network.fc, network.layers)
    return EagleTrainee(config, network)
