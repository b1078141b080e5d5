"""Training Hydra heads on a frozen target (2402.05109, section 4): every head reads the text's own tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.base import Checkpoint, HydraShape, PrefixShape
from foredraft.checkpoints.hydra import PREFIX
from foredraft.checkpoints.layouts import layout
from foredraft.drafters.borrowed import block_like
from foredraft.drafters.hydra_network import HydraHeads, tap
from foredraft.drafters.hydra_prefix import check
from foredraft.drafters.stepped_training import stepped_loss
from foredraft.drafters.training import Losses, Trace, check_loss
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel


@dataclass(frozen=True)
class TrainConfig:
    """`own_head`: every head has an output matrix, a copy of the target's to begin with, as published; without, the
    target's serves all. `rank`: heads read a projection of this width of what they see, None = all of it, as published.
    `prefix`: a decoder layer over the target's states comes before the heads, as in Hydra++. `decay`: head h's loss
    counts decay^h."""

    loss: str = "kl"
    heads: int = 4
    layers: int = 1
    own_head: bool = True
    rank: int | None = None
    prefix: bool = False
    decay: float = 0.8


class HydraTrainee:
    """Heads while they learn: head h from state t reads tokens t + 1 to t + 1 + h and is asked for token t + 2 + h."""

    def __init__(self, network: HydraHeads, config: TrainConfig) -> None:
        self.network = network
        self.config = config
        self.taps: tuple[int, ...] = (tap(network.shape, network.target[0]),)

    def loss(self, trace: Trace) -> Losses:
        shape, config = self.network.shape, self.config
        states = self.network.read(trace.features)
        return stepped_loss(self.network, trace, states, config.loss, shape.num_heads, config.decay, shape.vocab_size)

    def published(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As its authors have it, the two shorter forms excepted."""
        made = layout(self.network.shape, self.network.state_dict())
        return made.tensors, made.config | {"base_model_name_or_path": self.network.target[0].name}


def trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> HydraTrainee:
    """Heads to train on a target, in float32: new ones guess what the target's own head would, or those of `start`."""
    check_loss(config.loss)
    if not 0 < config.decay <= 1:
        raise ForedraftError(f"decay must lie in 0..1, got {config.decay}")
    if start is not None:
        if not isinstance(start.shape, HydraShape):
            raise ForedraftError(f"{start.folder} holds no Hydra heads but {start.format}; it cannot be trained on")
        if start.shape.prefix is not None:
            check(start.shape, block_like(target), start.folder)
        network = HydraHeads(start.shape, target).float()
        network.load_state_dict(start.tensors)
        return HydraTrainee(network.to(target.device), config)
    if config.heads < 1 or config.layers < 1:
        raise ForedraftError(f"heads and layers must be positive, got {config.heads} and {config.layers}")
    if config.rank is not None and config.rank < 1:
        raise ForedraftError(f"rank must be positive, got {config.rank}")
    shape = HydraShape(
        hidden=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=config.heads,
        num_layers=config.layers,
        has_own_head=config.own_head,
        rank=config.rank,
        prefix=_prefix_like(target) if config.prefix else None,
    )
    network = HydraHeads(shape, target).float()
    _begin(network, target)
    return HydraTrainee(network.to(target.device), config)


def _prefix_like(target: HFModel) -> PrefixShape:
    block = block_like(target)
    return PrefixShape(block.heads * block.head_dim, block.kv_heads * block.head_dim, block.intermediate)


@torch.no_grad()
def _begin(network: HydraHeads, target: HFModel) -> None:
    """Heads pass the state through; with a rank, what of it the target's output matrix reads most. A prefix layer adds
    nothing to it, and its norm changes only how sure a head is."""
    hidden, said = network.shape.hidden, target.head_weight.float().cpu()
    for name, parameter in network.named_parameters():
        if name.startswith(PREFIX):
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        elif "hydra_lm_head" not in name or name.endswith("bias"):
            parameter.zero_()
        else:
            scaling = getattr(target.model.config.get_text_config(), "logits_scaling", None) or 1.0
            parameter.copy_(said / scaling)
    kept = torch.eye(hidden)  # [H or less, H]
    if network.shape.rank is not None:
        kept = torch.linalg.eigh(said.T @ said).eigenvectors[:, -network.shape.rank :].T
    for name, parameter in network.named_parameters():
        if name.startswith("hydra_reduce"):
            parameter[: len(kept), :hidden] = kept
            torch.nn.init.normal_(parameter[len(kept) :], std=parameter.shape[1] ** -0.5)
        elif name.endswith("res_connection.weight"):
            parameter[:, : len(kept)] = kept.T
