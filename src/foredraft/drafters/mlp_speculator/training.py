"""Training of an MLP speculator (2404.19124, section 4).

The paper trains in two stages, on long documents and then on text that the target wrote. Both have the same loss: every
state of a sequence starts a draft of the sequence's own tokens. The trainer chooses the data.
"""

from dataclasses import dataclass, replace

import torch

from foredraft.checkpoints.layouts import CheckpointLayout
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.step_losses import compute_step_losses
from foredraft.drafters.losses import Losses, Trace, check_decay, check_loss
from foredraft.drafters.mlp_speculator.layout import make_layout
from foredraft.drafters.mlp_speculator.lstm_network import LSTMSpeculator
from foredraft.drafters.mlp_speculator.network import MLPSpeculator
from foredraft.drafters.mlp_speculator.shape import MlpSpeculatorShape
from foredraft.drafters.trainee import NOT_TRAINABLE, TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel

PUBLISHED_BRANCHING = (4, 3, 2)  # top_k_tokens_per_head of the smallest published speculator
CELLS = ("layer", "lstm")
LATER_BRANCHING = 2  # top_k_tokens_per_head of further steps
PUBLISHED_CANDIDATES = 5  # n_candidates of the smallest published speculator


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: one of `losses.LOSS_NAMES`.
        n_predict: number of steps.
        inner: width of the state; None = the target's hidden size.
        tied: whether all steps share embedding, norm and output matrix, and all but the first the state's matrix.
        scale_input: whether the target's state is normalised first.
        cell: what the state passes through: "layer" = one layer, as in the paper; "lstm" = an LSTM cell, as in
            Arctic's speculators, whose steps are tied.
        decay: weight of step i is decay^i, in (0, 1].
    """

    loss: str = "kl"
    n_predict: int = 4
    inner: int | None = None
    tied: bool = True
    scale_input: bool = True
    decay: float = 1.0
    cell: str = "layer"

    @staticmethod
    def read_shape(network: MLPSpeculator | LSTMSpeculator) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines, with their values."""
        shape = network.shape
        return {
            "n_predict": shape.n_predict,
            "inner": shape.inner,
            "tied": shape.is_tied,
            "scale_input": shape.scales_input,
            "cell": CELLS[shape.is_lstm],
        }


@dataclass(frozen=True)
class MLPSpeculatorTrainee:
    """Speculator in training. Step i from state t reads token t + 1 + i and predicts token t + 2 + i."""

    network: MLPSpeculator | LSTMSpeculator
    config: TrainConfig
    spec = TraineeSpec(hidden_layers=(AFTER_FINAL_NORM,))

    def compute_loss(self, trace: Trace) -> Losses:
        shape, config = self.network.shape, self.config
        return compute_step_losses(
            self.network, trace, trace.features, config.loss, shape.n_predict, config.decay, shape.vocab_size
        )

    def to_checkpoint(self) -> CheckpointLayout:
        """Return the published layout, with a tree for engines that draft trees."""
        shape = self.network.shape
        branching = shape.branching or (*PUBLISHED_BRANCHING, *[LATER_BRANCHING] * shape.n_predict)[: shape.n_predict]
        shape = replace(shape, branching=branching, candidates=shape.candidates or PUBLISHED_CANDIDATES)
        return make_layout(shape, self.network.state_dict())


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> MLPSpeculatorTrainee:
    """Make a speculator to train. See `Training`."""
    check_loss(config.loss)
    check_decay(config.decay)
    if start is None:
        network = _make_network(_build_shape(config, target))
        if network.shape.inner == target.hidden_size:
            _init_from_target(network, target)
    else:
        network = _make_network(start.require_shape(MlpSpeculatorShape, "MLP speculator", NOT_TRAINABLE))
        network.load_state_dict(start.tensors)
    return MLPSpeculatorTrainee(network.float().to(target.device), config)


def _make_network(shape: MlpSpeculatorShape) -> MLPSpeculator | LSTMSpeculator:
    return LSTMSpeculator(shape) if shape.is_lstm else MLPSpeculator(shape)


def _build_shape(config: TrainConfig, target: HFModel) -> MlpSpeculatorShape:
    inner = target.hidden_size if config.inner is None else config.inner
    if config.n_predict < 1 or inner < 1:
        raise ForedraftError(f"n_predict and inner must be positive, got {config.n_predict} and {inner}")
    if config.cell not in CELLS:
        raise ForedraftError(f"unknown cell {config.cell!r}; use one of: {', '.join(CELLS)}")
    is_lstm = config.cell == "lstm"
    if is_lstm and not config.tied:
        raise ForedraftError("the steps of an LSTM cell share their weights; leave tied=false out")
    return MlpSpeculatorShape(
        hidden=target.hidden_size,
        inner=inner,
        vocab_size=target.vocab_size,
        n_predict=config.n_predict,
        is_tied=config.tied,
        scales_input=config.scale_input,
        is_lstm=is_lstm,
    )


@torch.no_grad()
def _init_from_target(network: MLPSpeculator | LSTMSpeculator, target: HFModel) -> None:
    """Initialise with the target's embedding and output matrix, at the scale of a random initialisation."""
    std = network.shape.inner**-0.5
    embedding, head = target.embedding.float(), target.head_weight.float()
    for name, parameter in network.named_parameters():
        if name.startswith(("emb", "forget_emb")):
            parameter.copy_(embedding / embedding.std() * std)
        elif name.startswith("head"):
            parameter.copy_(head / head.std() * std)
