"""Training Chimera: every head against the target's law, on the text's own tokens (2402.15758, section 3).

Step k stands at position i as if k tokens had been drafted below token i + 1: the target's states are known up to i,
tokens i + 1 .. i + 1 + k come with what the trigram encoder makes of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foredraft.checkpoints.base import Checkpoint, ChimeraShape
from foredraft.checkpoints.layouts import layout
from foredraft.drafters.borrowed import block_like, pass_through
from foredraft.drafters.chimera_network import READ, ChimeraNetwork, trigrams
from foredraft.drafters.training import Losses, Trace, check_loss, draft_loss, mean
from foredraft.drafters.unrolled import Step, UnrolledAttention, weighted
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel
from foredraft.models.window import NORMED


@dataclass(frozen=True)
class TrainConfig:
    """`loss` of the logits against the target's law; `steps`: how many tokens deep it learns to draft, `decay`: weight
    of each further one; `heads`: depths with a head of their own, the last serves what is deeper; `taps`: boundaries
    of the target to see, -1 = the last state, normalised, from which far more can be foretold than from early ones;
    `intermediate`: width of the context encoder's inner layer,
    None = the target's."""

    loss: str = "kl"
    steps: int = 5
    decay: float = 0.9
    heads: int = 4
    taps: tuple[int, ...] = (NORMED,)
    intermediate: int | None = None


@dataclass(frozen=True)
class ChimeraTrainee:
    config: TrainConfig
    network: ChimeraNetwork

    @property
    def taps(self) -> tuple[int, ...]:
        return self.network.shape.taps

    def loss(self, trace: Trace) -> Losses:
        total, parts = weighted(steps(self.network, trace, self.config.steps), self._loss, self.config.decay)
        return Losses(total, parts)

    def _loss(self, step: Step) -> Tensor:
        law = step.trace.law.at(step.law_rows)
        return mean(draft_loss(self.config.loss, step.logits, law, step.tokens), step.mask)

    def published(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        made = layout(self.network.shape, self.network.state_dict())
        return made.tensors, made.config | {"base_model_name_or_path": self.network.target[0].name}


def steps(network: ChimeraNetwork, trace: Trace, count: int) -> Iterator[Step]:
    """Drafts of every position of a trace, one token deeper with every step."""
    tokens, device = trace.tokens, trace.tokens.device
    true = network.taken(trace.features.to(network.join.weight.dtype))  # [B, L, H]
    encoded = network.encoded(trigrams(tokens))  # [B, L + 1, H]
    length, attention = true.shape[1], UnrolledAttention([{}])
    positions = torch.arange(length + 1, device=device).expand(len(tokens), -1)
    network(tokens[:, :length], true, positions[:, :length], attention.attend)  # for its keys and values
    for index in range(count):
        rows = slice(index + 1, length)  # of the newest token, i + 1 + index
        if rows.start >= rows.stop:
            return
        attention.held.append({})
        states, _ = network(tokens[:, rows], encoded[:, rows], positions[:, rows], attention.attend)
        headed = network.headed(index, states, true[:, : states.shape[1]])
        yield Step(index, network.logits(headed), headed, trace)


def trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> ChimeraTrainee:
    """New heads for a target, or some to go on with. Raises ForedraftError for options that make none."""
    check_loss(config.loss)
    if config.steps < 1 or config.heads < 1 or not 0 < config.decay <= 1:
        raise ForedraftError("steps and heads must be positive, and decay lie in 0..1")
    if start is not None:
        return ChimeraTrainee(config, network_of(start, target).float().to(target.device))
    network = ChimeraNetwork(_shape(config, target), target).to(target.device)
    _begin(network, target)
    return ChimeraTrainee(config, network)


def network_of(checkpoint: Checkpoint, target: HFModel) -> ChimeraNetwork:
    """Raises ForedraftError where it is no Chimera's."""
    if not isinstance(checkpoint.shape, ChimeraShape):
        raise ForedraftError(f"{checkpoint.folder} holds no Chimera heads but {checkpoint.format}")
    network = ChimeraNetwork(checkpoint.shape, target)
    network.load_state_dict(checkpoint.tensors)
    return network


def _shape(config: TrainConfig, target: HFModel) -> ChimeraShape:
    taps, n = tuple(config.taps), target.num_layers
    if not taps or len(set(taps)) != len(taps) or any(tap != NORMED and not 1 <= tap <= n for tap in taps):
        raise ForedraftError(
            f"taps must be different boundaries between 1 and {n} of {target.name}'s {n} layers, or {NORMED} for the "
            f"last state; got {taps}"
        )
    block = block_like(target)
    inner = block.intermediate if config.intermediate is None else config.intermediate
    if inner < 1:
        raise ForedraftError(f"intermediate must be positive, got {inner}")
    return ChimeraShape(replace(block, intermediate=inner), target.vocab_size, taps, config.heads)


@torch.no_grad()
def _begin(network: ChimeraNetwork, target: HFModel) -> None:
    """A state goes through as it is; what the trigram encoder makes is of size one, whatever that of embeddings."""
    pass_through(network.join, network.layers)
    size = float(network.embedding.float().square().mean().sqrt())
    torch.nn.init.normal_(network.trigram.weight, std=1 / max(size, 1e-6) / (READ * network.shape.block.hidden) ** 0.5)
    if network.shape.has_fc:
        network.fc.weight[:, -network.shape.block.hidden :] += torch.eye(network.shape.block.hidden)
    for head in network.heads:
        head.weight.zero_()  # type: ignore[operator]
        head.bias.zero_()  # type: ignore[operator]
    network.norm.weight.copy_(_final_scale(target))


def _final_scale(target: HFModel) -> Tensor:
    """[H] what the target's final norm multiplies by, whatever it is called and however it keeps that."""
    norm: Any = getattr(target.model.get_decoder(), "norm", None)
    ones = torch.ones(target.hidden_size)
    if norm is None:
        return ones
    ones[::2] = -1  # of size one and of mean zero
    x = ones.to(target.device, target.embedding.dtype)
    scale: Tensor = norm(x) / x
    return scale.float()
