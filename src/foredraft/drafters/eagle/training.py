"""Training of an EAGLE head."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.target_access import derive_block_shape, init_as_identity
from foredraft.drafters.common.training_time_test import UnrolledStep, average_step_losses, unroll
from foredraft.drafters.eagle.checkpoint import EagleShape, make_layout
from foredraft.drafters.eagle.network import EagleNetwork, load_network
from foredraft.drafters.losses import Losses, Trace, check_loss
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
        steps = unroll(self.network, trace, features, self.config.steps)
        return average_step_losses(steps, self._compute_step_losses, self.config.decay)

    def _compute_step_losses(self, step: UnrolledStep) -> Tensor:
        """Return the losses [B, n] of one simulated step: those of the logits, and distances of predicted features."""
        losses = step.compute_losses(self.config.loss)
        if self.config.regression:
            target_features = step.true_features.to(step.features.dtype)
            distance = F.smooth_l1_loss(step.features, target_features, reduction="none").mean(-1)
            losses = losses + self.config.regression * distance
        return losses

    def to_checkpoint(self) -> CheckpointLayout:
        """Return the layout of EAGLE's authors."""
        return make_layout(self.network.shape, self.network.state_dict())


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> EagleTrainee:
    """Make a head to train; a new one outputs its input feature. See `Training`."""
    check_loss(config.loss)
    if config.steps < 1 or config.num_layers < 1 or not 0 < config.decay <= 1:
        raise ForedraftError("steps and num_layers must be positive, and decay must be above 0 and at most 1")
    if config.noise < 0 or config.regression < 0:
        raise ForedraftError("noise and regression must not be negative; 0 turns them off")
    if start is None:
        shape = EagleShape(derive_block_shape(target), target.vocab_size, config.num_layers, config.has_fc_bias)
        network = EagleNetwork(shape, target)
        init_as_identity(network.fc, network.layers)
    else:
        network = load_network(start, target)
    return EagleTrainee(config, network.float().to(target.device))
