"""Training an adapter for one exit: the target's law from the states of one of its first boundaries.

A node that is accepted has the states that the target's own pass gives it, so the states of texts are those of drafts,
and there is no step of its own drafts to practise.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from foredraft.checkpoints.base import Checkpoint, EarlyExitShape
from foredraft.checkpoints.layouts import layout
from foredraft.drafters.early_exit_adapter import ExitAdapter
from foredraft.drafters.newest_training import mean_loss
from foredraft.drafters.training import Losses, Trace, check_loss
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel
from foredraft.models.truncated import check_exit, final_norm

SHARE = 1 / 6  # of the layers, where none is named: an adapter makes up for much of what is left out


@dataclass(frozen=True)
class TrainConfig:
    """`exit_layer`: the layers that draft; None = a sixth of the target's. `rank`: width of the adapter."""

    loss: str = "kl"
    exit_layer: int | None = None
    rank: int = 192


class ExitTrainee:
    """An adapter while it learns: the state at position i is asked for token i + 1."""

    def __init__(self, network: ExitAdapter, target: HFModel, norm: nn.Module, config: TrainConfig) -> None:
        self.network = network
        self.target = target
        self.config = config
        self._norm = norm

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.network.shape.exit_layer,)

    def loss(self, trace: Trace) -> Losses:
        text, position = trace.mask[:, 1:].nonzero(as_tuple=True)
        law, tokens = trace.law.at((text, position)), trace.tokens[text, position + 1]
        states = trace.features[text, position]
        total = mean_loss(self.config.loss, self.logits, states, law, tokens, self.target.vocab_size)
        return Losses(total, {})

    def logits(self, states: Tensor) -> Tensor:
        """[R, H] -> [R, V]"""
        weight = self.network.norm.weight
        x = self.network(states.to(weight.dtype)).to(self.target.model.dtype)
        frozen = {name: value.detach() for name, value in self._norm.named_parameters()}
        return self.target.head(functional_call(self._norm, frozen, (x,)))

    def published(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        made = layout(self.network.shape, self.network.state_dict())
        return made.tensors, made.config | {
            "base_model_name_or_path": self.target.name,
            "target_num_layers": self.target.num_layers,
        }


def trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> ExitTrainee:
    """An adapter to train on a target, in float32: a new one, which changes nothing yet, or that of `start`."""
    check_loss(config.loss)
    norm = final_norm(target.model)
    if norm is None:
        raise ForedraftError(f"{target.name} has no norm before its head that could be told; no adapter can learn")
    if start is not None:
        if not isinstance(start.shape, EarlyExitShape):
            raise ForedraftError(f"{start.folder} holds no early-exit adapter but {start.format}; give no --start")
        if config.exit_layer not in (None, start.shape.exit_layer):
            raise ForedraftError(
                f"{start.folder} is an adapter for layer {start.shape.exit_layer}, not {config.exit_layer}"
            )
        network = ExitAdapter.loaded(start.shape, start.tensors, target)
    else:
        layer = config.exit_layer
        layer = max(1, round(SHARE * target.num_layers)) if layer is None else layer
        check_exit(target, layer)
        if config.rank < 1:
            raise ForedraftError(f"rank must be positive, got {config.rank}")
        network = ExitAdapter(EarlyExitShape(target.hidden_size, config.rank, layer), target)
    return ExitTrainee(network.float().to(target.device), target, norm, config)
