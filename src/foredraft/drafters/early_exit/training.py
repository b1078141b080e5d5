"""Training of an early-exit adapter: the target's distribution from the states of one of its first layers.

Accepted draft nodes have the same states as in the target's own pass, so training needs no steps on its own drafts.
"""

from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.func import functional_call

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.head_losses import compute_mean_loss
from foredraft.drafters.early_exit.adapter import ExitAdapter
from foredraft.drafters.early_exit.checkpoint import EarlyExitShape, make_layout
from foredraft.drafters.losses import Losses, Trace, check_loss
from foredraft.drafters.trainee import TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.models.truncated import check_exit_layer
from foredraft.models.truncated_modules import find_final_norm

DEFAULT_FRACTION = 1 / 6  # default exit layer, as a share of the target's layers


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: one of `losses.LOSS_NAMES`.
        exit_layer: number of target layers that draft; None = a sixth of them.
        rank: width of the adapter.
    """

    loss: str = "kl"
    exit_layer: int | None = None
    rank: int = 192

    @staticmethod
    def read_shape(network: ExitAdapter) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines, with their values."""
        shape = network.shape
        return {"exit_layer": shape.exit_layer, "rank": shape.rank}


@dataclass(frozen=True)
class EarlyExitTrainee:
    """Adapter in training. The state at position i predicts token i + 1."""

    network: ExitAdapter
    target: HFModel
    norm: nn.Module  # final norm of the target
    config: TrainConfig

    @property
    def spec(self) -> TraineeSpec:
        return TraineeSpec(hidden_layers=(self.network.shape.exit_layer,))

    def compute_loss(self, trace: Trace) -> Losses:
        sequence, position = trace.mask[:, 1:].nonzero(as_tuple=True)
        log_probs = trace.target_log_probs.select((sequence, position))
        tokens, states = trace.tokens[sequence, position + 1], trace.features[sequence, position]
        total = compute_mean_loss(
            self.config.loss, self.compute_logits, states, log_probs, tokens, self.target.vocab_size
        )
        return Losses(total, {})

    def compute_logits(self, states: Tensor) -> Tensor:
        """Compute logits [R, V] from states [R, H] through the adapter and the target's frozen norm and head."""
        weight = self.network.norm.weight
        x = self.network(states.to(weight.dtype)).to(self.target.model.dtype)
        frozen = {name: value.detach() for name, value in self.norm.named_parameters()}
        return self.target.compute_logits(functional_call(self.norm, frozen, (x,)))

    def to_checkpoint(self) -> CheckpointLayout:
        layout = make_layout(self.network.shape, self.network.state_dict())
        return replace(layout, config=layout.config | {"target_num_layers": self.target.num_layers})


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> EarlyExitTrainee:
    """Make an adapter to train; a new one changes nothing. See `Training`."""
    check_loss(config.loss)
    if target.has_encoder:
        raise ForedraftError(
            f"the method early_exit needs a decoder-only target, and {target.name} is not one; train another method"
        )
    norm = find_final_norm(target.model)
    if norm is None:
        raise ForedraftError(f"{target.name} has no recognisable norm before its head; no adapter can be trained")
    if start is None:
        network = ExitAdapter(_build_shape(config, target), target)
    else:
        shape = start.require_shape(EarlyExitShape, "early-exit adapter", "; train without --start")
        if config.exit_layer not in (None, shape.exit_layer):
            raise ForedraftError(f"{start.folder} is an adapter for layer {shape.exit_layer}, not {config.exit_layer}")
        network = ExitAdapter.from_tensors(shape, start.tensors, target)
    return EarlyExitTrainee(network.float().to(target.device), target, norm, config)


def _build_shape(config: TrainConfig, target: HFModel) -> EarlyExitShape:
    layer = config.exit_layer
    layer = max(1, round(DEFAULT_FRACTION * target.num_layers)) if layer is None else layer
    check_exit_layer(target, layer)
    if config.rank < 1:
        raise ForedraftError(f"rank must be positive, got {config.rank}")
    return EarlyExitShape(target.hidden_size, config.rank, layer)
