"""EAGLE-3 (2503.01840): one decoder layer over states of several depths of the target, with a head of its own.

It learns from nothing but the tokens it drafts, several deep on its own outputs, so that its output need not look like
a state of the target. Its vocabulary may be a part of the target's.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.aux_layers import default_taps, is_ascending
from foredraft.checkpoints.base import Checkpoint, Eagle3Shape
from foredraft.checkpoints.eagle3 import NORMED_STATE, RAW_STATE
from foredraft.checkpoints.layouts import layout
from foredraft.drafters.base import Context
from foredraft.drafters.borrowed import block_like, lender, loaded, packed_head, pass_through, settle
from foredraft.drafters.growth import TreeOptions
from foredraft.drafters.recurrent import FeatureDrafter, feature_lm
from foredraft.drafters.training import Losses, Trace, check_loss, draft_loss, mean
from foredraft.drafters.unrolled import Step, unroll, weighted
from foredraft.errors import ForedraftError
from foredraft.models.block import Attend, Layer, RMSNorm, Rotary
from foredraft.models.fused_features import FusedFeatures, Paired, why_not
from foredraft.models.lm import HFModel

__all__ = ["METHOD", "Config", "TrainConfig", "create", "trainee"]

METHOD = "eagle3"
AUTO_RANK = 40  # among the methods that read a model, as measured on the built-in target
NEVER = -30.0  # log-probability of what the target may say and the draft's vocabulary does not hold


@dataclass(frozen=True)
class Config(TreeOptions):
    """`feedback`: the state that a drafted token reads, "normed" or "raw"; None = as the folder says."""

    feedback: str | None = None


class Eagle3Network(nn.Module):
    """State-dict names are those of a published checkpoint, with `layers.0` for `midlayer`."""

    def __init__(self, shape: Eagle3Shape, target: HFModel) -> None:
        super().__init__()
        block, hidden = shape.block, shape.block.hidden
        self.shape = shape
        self.target = (target,)  # a tuple: its weights are none of ours
        width = len(shape.taps) * shape.target_hidden
        if shape.has_fc:
            self.fc = nn.Linear(width, hidden, bias=shape.has_fc_bias)
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(width, block.eps)
        if shape.has_fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.target_hidden, block.eps) for _ in shape.taps)
        self.layers = nn.ModuleList(Layer(block, 2 * hidden if i == 0 else None) for i in range(shape.num_layers))
        self.layers[0].hidden_norm = RMSNorm(hidden, block.eps)
        self.norm = RMSNorm(hidden, block.eps)
        self.rotary = Rotary(block)
        if shape.has_own_head:
            self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        if shape.draft_vocab_size != shape.vocab_size:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        if shape.has_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)
        self.embedding = target.embedding  # [V, H]

    @property
    def ids(self) -> Tensor | None:
        """[Vd] the target's ids of the draft's, None where they are the same."""
        offsets = getattr(self, "d2t", None)
        return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets

    def taken(self, features: Tensor) -> Tensor:
        if self.shape.norm_before_fc:
            features = self.input_norm(features)
        if self.shape.has_fc_norm:
            chunks = features.chunk(len(self.shape.taps), -1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.fc(features) if self.shape.has_fc else features

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        first: Any = self.layers[0]
        embedded = first.input_layernorm(F.embedding(tokens, self.embedding).to(features.dtype))
        normed = first.hidden_norm(features)
        x = normed if self.shape.norm_before_residual else features
        turn = self.rotary(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, i, attend, torch.cat([embedded, normed], -1) if i == 0 else None)
        states = self.norm(x)
        return states, states if self.shape.feeds_normed else x

    def logits(self, states: Tensor) -> Tensor:
        if self.shape.has_own_head:
            return self.lm_head(states)  # type: ignore[no-any-return]
        return self.target[0].head(states.to(self.embedding.dtype))


def create(config: Config, context: Context) -> FeatureDrafter:
    """Raises ForedraftError for a head of another kind or another target."""
    config.plan(context.num_tokens)  # options that make none are refused before anything is loaded
    return from_checkpoint(config, loaded(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: Context) -> FeatureDrafter:
    """From a head that is loaded, beside context.target."""
    network = _network(_fed(checkpoint, config.feedback), lender(context))
    settle(network, checkpoint.folder, context)
    lm, plan = feature_lm(network, _fused, context), config.plan(context.num_tokens)
    return FeatureDrafter(lm, network.shape.taps, plan, context, network.ids)


def _fed(checkpoint: Checkpoint, feedback: str | None) -> Checkpoint:
    """With the feedback that was asked for. Raises ForedraftError for a word that is none."""
    if feedback not in (None, NORMED_STATE, RAW_STATE):
        raise ForedraftError(f"feedback is {NORMED_STATE!r} or {RAW_STATE!r}, got {feedback!r}; leave it out otherwise")
    shape = checkpoint.shape
    if feedback is None or not isinstance(shape, Eagle3Shape):
        return checkpoint
    return replace(checkpoint, shape=replace(shape, feeds_normed=feedback == NORMED_STATE))


def _network(checkpoint: Checkpoint, target: HFModel) -> Eagle3Network:
    shape = checkpoint.shape
    if not isinstance(shape, Eagle3Shape):
        raise ForedraftError(f"{checkpoint.folder} holds no EAGLE-3 head but {checkpoint.format}")
    is_narrower = shape.block.hidden != target.hidden_size
    if is_narrower and not (shape.has_embedding and shape.has_own_head):
        raise ForedraftError(
            f"{checkpoint.folder} is {shape.block.hidden} wide and {target.name} {target.hidden_size}, and it lacks "
            "embed_tokens or lm_head of its own; it was made for another target, or exported without them"
        )
    network = Eagle3Network(shape, target)
    network.load_state_dict(checkpoint.tensors)
    return network


def _fused(network: Eagle3Network) -> FusedFeatures | None:
    shape, layers = network.shape, list(network.layers)
    head = network.lm_head.weight.detach() if shape.has_own_head else packed_head(network.target[0])
    if head is None or why_not(layers, network.embedding) is not None:
        return None
    first: Any = layers[0]
    front = Paired(first.hidden_norm, shape.norm_before_residual)
    return FusedFeatures.of(
        layers, front, network.norm, shape.feeds_normed, network.embedding, head, shape.block, network.rotary
    )


@dataclass(frozen=True)
class TrainConfig:
    """`loss` of the logits against the target's law; `steps`: how many tokens deep it drafts on its own outputs while
    it learns, `decay`: weight of each further step; `taps`: boundaries of the target to see, None = 2, n/2, n - 3, or
    three others for a target of fewer than 7 layers; `draft_vocab_size`: how many of the data's most frequent tokens it
    may draft, None = all."""

    loss: str = "kl"
    steps: int = 5
    decay: float = 0.8
    taps: tuple[int, ...] | None = None
    num_layers: int = 1
    draft_vocab_size: int | None = None


@dataclass
class Eagle3Trainee:
    config: TrainConfig
    network: Eagle3Network

    @property
    def taps(self) -> tuple[int, ...]:
        return self.network.shape.taps

    def prepare(self, counts: Tensor) -> None:
        """Choose the draft's vocabulary by how often tokens occur in the data, counts [V]."""
        shape = self.network.shape
        if shape.draft_vocab_size == shape.vocab_size:
            return
        offsets: Tensor = self.network.get_buffer("d2t")
        ids = counts.topk(shape.draft_vocab_size).indices.sort().values.to(offsets.device)
        offsets.copy_(ids - torch.arange(len(ids), device=ids.device))
        _copy_head(self.network, ids)

    def loss(self, trace: Trace) -> Losses:
        first = self.network.taken(trace.features.to(self.network.norm.weight.dtype))
        total, parts = weighted(unroll(self.network, trace, first, self.config.steps), self._loss, self.config.decay)
        return Losses(total, parts)

    def _loss(self, step: Step) -> Tensor:
        law, ids = step.trace.law.at(step.law_rows), self.network.ids
        if ids is None:
            return mean(draft_loss(self.config.loss, step.logits, law, step.tokens), step.mask)
        logits = step.logits.new_full((*step.logits.shape[:-1], self.network.shape.vocab_size), -torch.inf)
        log_q = step.logits.float().log_softmax(-1)
        logits = logits.float().index_copy(-1, ids, log_q).clamp_min(NEVER)
        return mean(draft_loss(self.config.loss, logits, law, step.tokens), step.mask)

    def published(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """In the layout of its authors."""
        made = layout(self.network.shape, self.network.state_dict())
        return made.tensors, made.config | {"base_model_name_or_path": self.network.target[0].name}


def trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> Eagle3Trainee:
    """A new head for a target, or one to go on with. Raises ForedraftError for options that make none."""
    check_loss(config.loss)
    if config.steps < 1 or config.num_layers < 1 or not 0 < config.decay <= 1:
        raise ForedraftError("steps and num_layers must be positive, and decay lie in 0..1")
    if start is not None:
        if isinstance(start.shape, Eagle3Shape) and start.shape.block.windows:
            raise ForedraftError(f"{start.folder} has sliding attention, which is not trained here; start without it")
        return Eagle3Trainee(config, _network(start, target).float().to(target.device))
    network = Eagle3Network(_shape(config, target), target).to(target.device)
    pass_through(network.fc, network.layers)
    _copy_head(network, torch.arange(network.shape.draft_vocab_size))
    return Eagle3Trainee(config, network)


def _shape(config: TrainConfig, target: HFModel) -> Eagle3Shape:
    n, size = target.num_layers, config.draft_vocab_size or target.vocab_size
    if n < 2:
        raise ForedraftError(
            f"{target.name} has {n} layer, and EAGLE-3 reads states between layers; train medusa for it"
        )
    taps = _default_taps(n) if config.taps is None else tuple(config.taps)
    if sorted(set(taps)) != list(taps) or not taps or taps[0] < 1 or taps[-1] >= n:
        example = ",".join(map(str, _default_taps(n)))
        raise ForedraftError(
            f"taps must be different boundaries between 1 and {n - 1} of {target.name}'s {n} layers, rising "
            f"(--set taps={example}); got {taps}"
        )
    if not 1 <= size <= target.vocab_size:
        raise ForedraftError(f"draft_vocab_size must lie in 1..{target.vocab_size}, got {size}")
    block = replace(block_like(target), max_positions=max(2048, block_like(target).max_positions))
    return Eagle3Shape(block, target.vocab_size, size, target.hidden_size, taps, config.num_layers)


def _default_taps(num_layers: int) -> tuple[int, ...]:
    """The authors', which engines take for granted; where these are not three, as many as there are, spread evenly."""
    published = default_taps(num_layers)
    if is_ascending(published) and published[-1] < num_layers:
        return published
    count, last = min(3, num_layers - 1), num_layers - 1
    if count < 2:
        return (1,)
    return tuple(1 + round(i * (last - 1) / (count - 1)) for i in range(count))


@torch.no_grad()
def _copy_head(network: Eagle3Network, ids: Tensor) -> None:
    """The target's rows of these tokens, and its final norm, are where the head begins."""
    weight = network.target[0].head_weight
    network.lm_head.weight.copy_(weight[ids.to(weight.device)])
