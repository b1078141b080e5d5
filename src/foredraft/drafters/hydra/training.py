"""Training of Hydra heads on a frozen target (2402.05109, section 4): every head reads the sequence's own tokens."""

from dataclasses import dataclass

import torch

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.step_losses import compute_step_losses
from foredraft.drafters.common.target_access import derive_block_shape, scale_output_matrix
from foredraft.drafters.hydra.checkpoint import PREFIX_LAYER, HydraPrefixShape, HydraShape, make_layout
from foredraft.drafters.hydra.network import HydraHeads, choose_hidden_layer
from foredraft.drafters.hydra.prefix import check_prefix_shape
from foredraft.drafters.losses import Losses, Trace, check_decay, check_loss
from foredraft.drafters.trainee import NOT_TRAINABLE, TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: one of `losses.LOSS_NAMES`.
        heads: number of heads.
        layers: residual blocks per head.
        own_head: whether every head has its own output matrix, initialised with the target's, as published; without,
            all use the target's.
        rank: width of a projection of each head's input; None = no projection, as published.
        prefix: whether a decoder layer over the target's states precedes the heads (Hydra++).
        decay: weight of head h is decay^h, in (0, 1].
    """

    loss: str = "kl"
    heads: int = 4
    layers: int = 1
    own_head: bool = True
    rank: int | None = None
    prefix: bool = False
    decay: float = 0.8

    @staticmethod
    def read_shape(network: HydraHeads) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines, with their values."""
        shape = network.shape
        return {
            "heads": shape.num_heads,
            "layers": shape.num_layers,
            "own_head": shape.has_own_head,
            "rank": shape.rank,
            "prefix": shape.prefix is not None,
        }


@dataclass(frozen=True)
class HydraTrainee:
    """Hydra heads in training. Head h from state t reads tokens t + 1 to t + 1 + h and predicts token t + 2 + h."""

    network: HydraHeads
    config: TrainConfig

    @property
    def spec(self) -> TraineeSpec:
        return TraineeSpec(hidden_layers=(choose_hidden_layer(self.network.shape, self.network.target[0]),))

    def compute_loss(self, trace: Trace) -> Losses:
        shape, config = self.network.shape, self.config
        states = self.network.encode_features(trace.features)
        return compute_step_losses(
            self.network, trace, states, config.loss, shape.num_heads, config.decay, shape.vocab_size
        )

    def to_checkpoint(self) -> CheckpointLayout:
        """Return the authors' layout, extended by `rank` and shared output matrices."""
        return make_layout(self.network.shape, self.network.state_dict())


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> HydraTrainee:
    """Make heads to train; new ones predict what the target's output matrix would. See `Training`."""
    check_loss(config.loss)
    check_decay(config.decay)
    if start is None:
        network = HydraHeads(_build_shape(config, target), target)
        _init_from_target(network, target)
    else:
        shape = start.require_shape(HydraShape, "Hydra heads", NOT_TRAINABLE)
        if shape.prefix is not None:
            check_prefix_shape(shape, derive_block_shape(target), start.folder)
        network = HydraHeads(shape, target)
        network.load_state_dict(start.tensors)
    return HydraTrainee(network.float().to(target.device), config)


def _build_shape(config: TrainConfig, target: HFModel) -> HydraShape:
    if config.heads < 1 or config.layers < 1:
        raise ForedraftError(f"heads and layers must be positive, got {config.heads} and {config.layers}")
    if config.rank is not None and config.rank < 1:
        raise ForedraftError(f"rank must be positive, got {config.rank}")
    return HydraShape(
        hidden=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=config.heads,
        num_layers=config.layers,
        has_own_head=config.own_head,
        rank=config.rank,
        prefix=_derive_prefix_shape(target) if config.prefix else None,
    )


def _derive_prefix_shape(target: HFModel) -> HydraPrefixShape:
    block = derive_block_shape(target)
    return HydraPrefixShape(block.heads * block.head_dim, block.kv_heads * block.head_dim, block.intermediate)


@torch.no_grad()
def _init_from_target(network: HydraHeads, target: HFModel) -> None:
    """Initialise heads that pass the state through, so that each predicts what the target's output matrix would.

    With a rank they pass the part of the state with the largest effect on the logits. A prefix layer starts as identity
    up to its norm, which changes only the scale.
    """
    hidden, head_weight = network.shape.hidden, target.head_weight.float().cpu()
    for name, parameter in network.named_parameters():
        if name.startswith(PREFIX_LAYER):
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        elif "hydra_lm_head" not in name or name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.copy_(scale_output_matrix(target))
    projection = torch.eye(hidden)  # [H or rank, H]
    if network.shape.rank is not None:
        projection = torch.linalg.eigh(head_weight.T @ head_weight).eigenvectors[:, -network.shape.rank :].T
    for name, parameter in network.named_parameters():
        if name.startswith("hydra_reduce"):
            parameter[: len(projection), :hidden] = projection
            torch.nn.init.normal_(parameter[len(projection) :], std=parameter.shape[1] ** -0.5)
        elif name.endswith("res_connection.weight"):
            parameter[:, : len(projection)] = projection.T
