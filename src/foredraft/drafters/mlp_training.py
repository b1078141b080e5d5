"""Training an MLP speculator: on long texts first, then on what the target writes (2404.19124, section 4).

Both stages have one loss: every state of a text is the root of a draft whose tokens are the text's own. What differs is
the data, which is the trainer's to give.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.base import Checkpoint, SpeculatorShape
from foredraft.checkpoints.layouts import layout
from foredraft.drafters.mlp_network import MLPSpeculator
from foredraft.drafters.stepped_training import stepped_loss
from foredraft.drafters.training import Losses, Trace, check_loss
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel
from foredraft.models.window import NORMED

PUBLISHED_BRANCHING = (4, 3, 2)  # top_k_tokens_per_head of the smallest published one; later steps have 2


@dataclass(frozen=True)
class TrainConfig:
    """`n_predict`: steps. `inner`: width of the state, None = the target's. `tied`: all steps share embeddings, norms
    and output matrix, and all but the first their state's matrix. `decay`: step i's loss counts decay^i."""

    loss: str = "kl"
    n_predict: int = 4
    inner: int | None = None
    tied: bool = True
    scale_input: bool = True
    decay: float = 1.0


class SpeculatorTrainee:
    """A speculator while it learns: step i from state t reads token t + 1 + i and is asked for token t + 2 + i."""

    taps: tuple[int, ...] = (NORMED,)

    def __init__(self, network: MLPSpeculator, target: HFModel, config: TrainConfig) -> None:
        self.network = network
        self.target = target
        self.config = config

    def loss(self, trace: Trace) -> Losses:
        shape, config = self.network.shape, self.config
        return stepped_loss(
            self.network, trace, trace.features, config.loss, shape.n_predict, config.decay, shape.vocab_size
        )

    def published(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As IBM has it, with the trees of its smallest: only those who draft trees read that."""
        shape = self.network.shape
        branching = shape.branching or (*PUBLISHED_BRANCHING, *[2] * shape.n_predict)[: shape.n_predict]
        made = layout(replace(shape, branching=branching), self.network.state_dict())
        return made.tensors, made.config | {
            "n_candidates": shape.candidates or 5,
            "base_model_name_or_path": self.target.name,
        }


def trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> SpeculatorTrainee:
    """A speculator to train on a target, in float32: a new one, or the one of `start`."""
    check_loss(config.loss)
    if start is not None:
        if not isinstance(start.shape, SpeculatorShape):
            raise ForedraftError(f"{start.folder} holds no MLP speculator but {start.format}; it cannot be trained on")
        network = MLPSpeculator(start.shape).float()
        network.load_state_dict(start.tensors)
        return SpeculatorTrainee(network.to(target.device), target, config)
    inner = target.hidden_size if config.inner is None else config.inner
    if config.n_predict < 1 or inner < 1:
        raise ForedraftError(f"n_predict and inner must be positive, got {config.n_predict} and {inner}")
    if not 0 < config.decay <= 1:
        raise ForedraftError(f"decay must lie in 0..1, got {config.decay}")
    shape = SpeculatorShape(
        hidden=target.hidden_size,
        inner=inner,
        vocab_size=target.vocab_size,
        n_predict=config.n_predict,
        is_tied=config.tied,
        scales_input=config.scale_input,
    )
    network = MLPSpeculator(shape).float()
    if inner == target.hidden_size:
        _begin_like(network, target)
    return SpeculatorTrainee(network.to(target.device), target, config)


@torch.no_grad()
def _begin_like(network: MLPSpeculator, target: HFModel) -> None:
    """Where the widths agree the target's own tokens begin better than noise does; at the size noise would have."""
    spread = network.shape.inner**-0.5
    read, said = target.embedding.float(), target.head_weight.float()
    for name, parameter in network.named_parameters():
        if name.startswith("emb"):
            parameter.copy_(read / read.std() * spread)
        elif name.startswith("head"):
            parameter.copy_(said / said.std() * spread)
