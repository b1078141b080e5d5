"""Training of an MTP layer: one layer that is reused for every draft token (FastMTP, 2509.18362)."""

from dataclasses import dataclass

import torch
from torch import nn

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.target_access import describe_target
from foredraft.drafters.common.training_time_test import average_step_losses, unroll
from foredraft.drafters.losses import Losses, Trace, check_loss
from foredraft.drafters.mtp.checkpoint import make_layout, read_from_target
from foredraft.drafters.mtp.network import MtpNetwork, load_network
from foredraft.drafters.mtp.shape import MtpShape
from foredraft.drafters.mtp.spellings import choose_spelling
from foredraft.drafters.trainee import TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel

OUTPUT_MATRICES = ("o_proj.weight", "down_proj.weight", "experts.down_proj")  # last matrices of attention and MLP


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: loss of the logits against the target's distribution, one of `losses.LOSS_NAMES`.
        steps: number of unrolled steps. Each later step reads the outputs of the one before.
        decay: the loss of unrolled step k has the weight decay^k; in (0, 1].
        fine_tunes: start from the layer in the target's own folder.
    """

    loss: str = "ce"
    steps: int = 3
    decay: float = 0.6
    fine_tunes: bool = False

    @staticmethod
    def read_shape(network: MtpNetwork) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines: none."""
        del network
        return {}


@dataclass(frozen=True)
class MtpTrainee:
    """MTP layer in training, on a frozen target. Implements `Trainee`."""

    config: TrainConfig
    network: MtpNetwork

    @property
    def spec(self) -> TraineeSpec:
        return TraineeSpec(hidden_layers=(AFTER_FINAL_NORM,))

    def compute_loss(self, trace: Trace) -> Losses:
        """Return the mean of the losses of the simulated steps with weights decay^k.

        Args:
            trace: training sequences with the recorded outputs of the target.
        """
        features = trace.features.to(self.network.projection.weight.dtype)
        steps = unroll(self.network, trace, features, self.config.steps)
        return average_step_losses(steps, lambda step: step.compute_losses(self.config.loss), self.config.decay)

    def to_checkpoint(self) -> CheckpointLayout:
        """Return the layout with Qwen's names."""
        return make_layout(self.network.shape, self.network.state_dict())


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> MtpTrainee:
    """Make a layer to train; a new one outputs the direction of its input state. See `Training`."""
    check_loss(config.loss)
    if config.steps < 1 or not 0 < config.decay <= 1:
        raise ForedraftError("steps must be positive, and decay must be above 0 and at most 1")
    if start is not None and config.fine_tunes:
        raise ForedraftError("fine_tunes starts from the target's own layer, and --start from another; leave one out")
    if config.fine_tunes:
        start = read_from_target(describe_target(target))
    if start is None:
        spelling = choose_spelling(target.model.config.get_text_config().model_type)
        shape = MtpShape.from_flags(target.hidden_size, target.vocab_size, spelling.flags)
        network = MtpNetwork(shape, target)
        _init_as_identity(network, target)
    else:
        network = load_network(start, target)
    network = network.float().to(target.device)
    return MtpTrainee(config, network)


@torch.no_grad()
def _init_as_identity(network: MtpNetwork, target: HFModel) -> None:
    """Initialise a new layer so that it outputs its input state, normed."""
    for module in network.layer.modules():  # transformers leaves weights outside linear layers without values
        if not isinstance(module, nn.Linear):
            target.model._init_weights(module)
    for name, weight in network.layer.named_parameters():
        if name.endswith(OUTPUT_MATRICES):
            weight.zero_()
    hidden = network.shape.hidden
    network.projection.weight.zero_()
    network.projection.weight[:, -hidden:] = torch.eye(hidden)
