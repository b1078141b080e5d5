"""Training of Chimera on a frozen target, on the tokens of the data (2402.15758, section 3).

Step k simulates, at every position i, a draft of k tokens below token i + 1. States up to i are the target's; tokens
i + 1 to i + 1 + k have states of the trigram encoder.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.chimera.checkpoint import ChimeraShape, make_layout
from foredraft.drafters.chimera.network import TRIGRAM_TOKENS, ChimeraNetwork, build_trigrams
from foredraft.drafters.common.target_access import derive_block_shape, init_as_identity
from foredraft.drafters.common.training_time_test import UnrolledAttention, UnrolledStep, average_step_losses
from foredraft.drafters.losses import Losses, Trace, check_loss
from foredraft.drafters.trainee import TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel

MIN_EMBEDDING_SCALE = 1e-6  # floor of the embedding's root mean square, before a division


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: loss of the logits against the target's distribution, one of `losses.LOSS_NAMES`.
        steps: depth of the drafts to train on.
        decay: weight of step k is decay^k, in (0, 1].
        heads: number of heads; the last one serves all deeper tokens.
        taps: layer boundaries of the target to read; -1 = after the final norm, which predicts best.
        intermediate: width of the context encoder's MLP; None = the target's.
    """

    loss: str = "kl"
    steps: int = 5
    decay: float = 0.9
    heads: int = 4
    taps: tuple[int, ...] = (AFTER_FINAL_NORM,)
    intermediate: int | None = None

    @staticmethod
    def read_shape(network: ChimeraNetwork) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines, with their values."""
        shape = network.shape
        return {"heads": shape.num_heads, "taps": shape.hidden_layers, "intermediate": shape.block.intermediate}


@dataclass(frozen=True)
class ChimeraTrainee:
    """Chimera in training."""

    config: TrainConfig
    network: ChimeraNetwork

    @property
    def spec(self) -> TraineeSpec:
        return TraineeSpec(self.network.shape.hidden_layers)

    def compute_loss(self, trace: Trace) -> Losses:
        steps = unroll_heads(self.network, trace, self.config.steps)
        return average_step_losses(steps, lambda step: step.compute_losses(self.config.loss), self.config.decay)

    def to_checkpoint(self) -> CheckpointLayout:
        return make_layout(self.network.shape, self.network.state_dict())


def unroll_heads(network: ChimeraNetwork, trace: Trace, count: int) -> Iterator[UnrolledStep]:
    """Simulate drafts from every position of a trace, one token deeper with every step.

    Args:
        network: network in training.
        trace: sequences and target outputs.
        count: maximum number of steps; short sequences end earlier.
    """
    tokens, device = trace.tokens, trace.tokens.device
    target_states = network.project_features(trace.features.to(network.join.weight.dtype))  # [B, L, H]
    encoded = network.encode_trigrams(build_trigrams(tokens))  # [B, L + 1, H]
    length, attention = target_states.shape[1], UnrolledAttention([{}])
    positions = torch.arange(length + 1, device=device).expand(len(tokens), -1)
    network(
        tokens[:, :length], target_states, positions[:, :length], attention.attend
    )  # computes the keys and values of step 0
    for index in range(count):
        rows = slice(index + 1, length)  # positions of the newest token, i + 1 + index
        if rows.start >= rows.stop:
            return
        attention.kv_by_step.append({})
        states, _ = network(tokens[:, rows], encoded[:, rows], positions[:, rows], attention.attend)
        outputs = network.apply_head(index, states, target_states[:, : states.shape[1]])
        yield UnrolledStep(index, network.compute_logits(outputs), outputs, trace)


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> ChimeraTrainee:
    """Make heads to train. See `Training`."""
    check_loss(config.loss)
    if config.steps < 1 or config.heads < 1 or not 0 < config.decay <= 1:
        raise ForedraftError("steps and heads must be positive, and decay must be above 0 and at most 1")
    if start is None:
        network = ChimeraNetwork(_build_shape(config, target), target).to(target.device)
        _init_from_target(network, target)
    else:
        network = load_network(start, target)
    return ChimeraTrainee(config, network.float().to(target.device))


def load_network(checkpoint: Checkpoint, target: HFModel) -> ChimeraNetwork:
    """Load the network of a checkpoint. Raises ForedraftError for a checkpoint of another method."""
    network = ChimeraNetwork(checkpoint.require_shape(ChimeraShape, "Chimera heads"), target)
    network.load_state_dict(checkpoint.tensors)
    return network


def _build_shape(config: TrainConfig, target: HFModel) -> ChimeraShape:
    layers, n = tuple(config.taps), target.num_layers
    is_valid = all(layer == AFTER_FINAL_NORM or 1 <= layer <= n for layer in layers)
    if not layers or len(set(layers)) != len(layers) or not is_valid:
        raise ForedraftError(
            f"taps must be different boundaries between 1 and {n} of {target.name}'s {n} layers, or {AFTER_FINAL_NORM} "
            f"for the last state; got {layers}"
        )
    block = derive_block_shape(target)
    inner = block.intermediate if config.intermediate is None else config.intermediate
    if inner < 1:
        raise ForedraftError(f"intermediate must be positive, got {inner}")
    return ChimeraShape(replace(block, intermediate=inner), target.vocab_size, layers, config.heads)


@torch.no_grad()
def _init_from_target(network: ChimeraNetwork, target: HFModel) -> None:
    """Initialise the network so that a state passes through unchanged and trigram states have unit scale."""
    init_as_identity(network.join, network.layers)
    scale = float(network.embedding.float().square().mean().sqrt())
    torch.nn.init.normal_(
        network.trigram.weight,
        std=1 / max(scale, MIN_EMBEDDING_SCALE) / (TRIGRAM_TOKENS * network.shape.block.hidden) ** 0.5,
    )
    if network.shape.has_fc:
        hidden = network.shape.block.hidden
        network.fc.weight[:, -hidden:] += torch.eye(hidden, device=network.fc.weight.device)
    for head in network.heads:
        head.weight.zero_()  # type: ignore[operator]
        head.bias.zero_()  # type: ignore[operator]
    network.norm.weight.copy_(_measure_norm_scale(target))


def _measure_norm_scale(target: HFModel) -> Tensor:
    """Measure the factors [H] of the target's final norm by running it, independent of how it stores them."""
    norm: Any = getattr(target.model.get_decoder(), "norm", None)
    ones = torch.ones(target.hidden_size)
    if norm is None:
        return ones
    ones[::2] = -1  # root mean square 1 and mean 0, so any norm returns its factors
    x = ones.to(target.device, target.embedding.dtype)
    scale: Tensor = norm(x) / x
    return scale.float()
