"""EAGLE-3 (2503.01840): a decoder layer over target states of several depths, with its own output matrix.

Training uses the token loss alone, over several steps on the network's own outputs, so its features need not resemble
target states. Its vocabulary may be a subset of the target's. `FeatureDrafter` does the drafting.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.aux_layers import choose_default_layers, is_ascending
from foredraft.checkpoints.eagle3 import NORMED_STATE, RAW_STATE
from foredraft.checkpoints.layouts import make_layout
from foredraft.checkpoints.schema import Checkpoint, Eagle3Shape
from foredraft.drafters.feature_drafter import FeatureDrafter, make_feature_lm
from foredraft.drafters.losses import Losses, Trace, average_over_mask, check_loss, compute_draft_loss
from foredraft.drafters.registry import DrafterContext
from foredraft.drafters.target_access import (
    bind_to_target,
    derive_block_shape,
    get_packed_lm_head,
    init_as_identity,
    load_checkpoint,
    require_target,
)
from foredraft.drafters.training_time_test import UnrolledStep, average_step_losses, unroll
from foredraft.drafters.tree_builder import TreeOptions
from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import AttentionFunction, DraftLayer, RMSNorm, RotaryEmbedding
from foredraft.models.hf import HFModel
from foredraft.models.native.draft_layers import NativeDraftLayers, PairedInput, explain_unsupported

__all__ = ["METHOD", "Config", "TrainConfig", "create", "create_trainee"]

METHOD = "eagle3"
AUTO_RANK = 40  # among the methods with a model, measured on the built-in target; higher is better
OUT_OF_VOCAB_LOG_PROB = -30.0  # log-probability, in the loss, of tokens outside the draft's vocabulary
NUM_DEFAULT_LAYERS = 3  # hidden layers to read by default
MIN_POSITIONS = 2048  # lower bound of a new head's maximum sequence length, in tokens


@dataclass(frozen=True)
class Config(TreeOptions):
    """Options: the tree options, and `feedback`.

    Args:
        feedback: feature that a draft token reads: the output after ("normed") or before ("raw") the final norm;
            None = as in the checkpoint.
    """

    feedback: str | None = None


class Eagle3Network(nn.Module):
    """Draft network of EAGLE-3. State-dict names are those of published checkpoints, with `layers.0` for `midlayer`."""

    def __init__(self, shape: Eagle3Shape, target: HFModel) -> None:
        super().__init__()
        block, hidden = shape.block, shape.block.hidden
        self.shape = shape
        self.target = (target,)  # in a tuple, so that its weights are not registered here
        width = len(shape.hidden_layers) * shape.target_hidden
        if shape.has_fc:
            self.fc = nn.Linear(width, hidden, bias=shape.has_fc_bias)
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(width, block.eps)
        if shape.has_fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.target_hidden, block.eps) for _ in shape.hidden_layers)
        self.layers = nn.ModuleList(DraftLayer(block, 2 * hidden if i == 0 else None) for i in range(shape.num_layers))
        self.layers[0].hidden_norm = RMSNorm(hidden, block.eps)
        self.norm = RMSNorm(hidden, block.eps)
        self.rotary = RotaryEmbedding(block)
        if shape.has_own_head:
            self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        if shape.draft_vocab_size != shape.vocab_size:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        if shape.has_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)
        self.embedding = target.embedding  # [V, H]

    @property
    def token_ids(self) -> Tensor | None:
        """Target token id [Vd] of each draft token; None if the vocabularies are the same."""
        offsets = getattr(self, "d2t", None)
        return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets

    def project_features(self, features: Tensor) -> Tensor:
        if self.shape.norm_before_fc:
            features = self.input_norm(features)
        if self.shape.has_fc_norm:
            chunks = features.chunk(len(self.shape.hidden_layers), -1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, chunks, strict=True)], -1)
        return self.fc(features) if self.shape.has_fc else features

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        first: Any = self.layers[0]
        embedded = first.input_layernorm(F.embedding(tokens, self.embedding).to(features.dtype))
        normed = first.hidden_norm(features)
        x = normed if self.shape.norm_before_residual else features
        rotary = self.rotary(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, i, attend, torch.cat([embedded, normed], -1) if i == 0 else None)
        states = self.norm(x)
        return states, states if self.shape.feeds_normed else x

    def compute_logits(self, states: Tensor) -> Tensor:
        if self.shape.has_own_head:
            return self.lm_head(states)  # type: ignore[no-any-return]
        return self.target[0].compute_logits(states.to(self.embedding.dtype))


def create(config: Config, context: DrafterContext) -> FeatureDrafter:
    """Load the head and make its drafter.

    Raises:
        ForedraftError: for invalid options, or a head of another method or another target.
    """
    config.to_tree_spec(context.num_speculative_tokens)  # report invalid options before the checkpoint is loaded
    return from_checkpoint(config, load_checkpoint(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: DrafterContext) -> FeatureDrafter:
    """Make the drafter of a loaded head for `context.target`."""
    network = _load_network(_apply_feedback(checkpoint, config.feedback), require_target(context))
    bind_to_target(network, checkpoint.folder, context)
    lm, spec = make_feature_lm(network, _make_native, context), config.to_tree_spec(context.num_speculative_tokens)
    return FeatureDrafter(lm, network.shape.hidden_layers, spec, context, network.token_ids)


def _apply_feedback(checkpoint: Checkpoint, feedback: str | None) -> Checkpoint:
    """Return the checkpoint with the user's feedback setting. Raises ForedraftError for an unknown value."""
    if feedback not in (None, NORMED_STATE, RAW_STATE):
        raise ForedraftError(f"feedback must be {NORMED_STATE!r} or {RAW_STATE!r}, got {feedback!r}; or leave it out")
    shape = checkpoint.shape
    if feedback is None or not isinstance(shape, Eagle3Shape):
        return checkpoint
    return replace(checkpoint, shape=replace(shape, feeds_normed=feedback == NORMED_STATE))


def _load_network(checkpoint: Checkpoint, target: HFModel) -> Eagle3Network:
    shape = checkpoint.shape
    if not isinstance(shape, Eagle3Shape):
        raise ForedraftError(f"{checkpoint.folder} holds no EAGLE-3 head but {checkpoint.format}")
    is_narrower = shape.block.hidden != target.hidden_size
    if is_narrower and not (shape.has_embedding and shape.has_own_head):
        raise ForedraftError(
            f"{checkpoint.folder} is {shape.block.hidden} wide and {target.name} {target.hidden_size}, and has no "
            "embed_tokens or lm_head; it was trained for another target, or exported without them"
        )
    network = Eagle3Network(shape, target)
    network.load_state_dict(checkpoint.tensors)
    return network


def _make_native(network: Eagle3Network) -> NativeDraftLayers | None:
    shape, layers = network.shape, list(network.layers)
    lm_head = network.lm_head.weight.detach() if shape.has_own_head else get_packed_lm_head(network.target[0])
    if lm_head is None or explain_unsupported(layers, network.embedding) is not None:
        return None
    first: Any = layers[0]
    front = PairedInput(first.hidden_norm, shape.norm_before_residual)
    return NativeDraftLayers.from_layers(
        layers, front, network.norm, shape.feeds_normed, network.embedding, lm_head, shape.block, network.rotary
    )


@dataclass(frozen=True)
class TrainConfig:
    """Training settings.

    Args:
        loss: loss of the logits against the target's distribution, one of `losses.LOSS_NAMES`.
        steps: depth of drafts on the network's own outputs (training-time test).
        decay: weight of step k is decay^k, in (0, 1].
        taps: layer boundaries of the target to read, ascending; None = 2, n/2, n - 3 of n layers, or up to three evenly
            spread ones for fewer than 7 layers.
        num_layers: decoder layers of the head.
        draft_vocab_size: number of tokens that can be drafted, the most frequent in the data; None = all.
    """

    loss: str = "kl"
    steps: int = 5
    decay: float = 0.8
    taps: tuple[int, ...] | None = None
    num_layers: int = 1
    draft_vocab_size: int | None = None

    @staticmethod
    def read_shape(network: Eagle3Network) -> dict[str, object]:
        """Return the settings that a checkpoint to start from determines, with their values."""
        shape = network.shape
        return {
            "taps": shape.hidden_layers,
            "num_layers": shape.num_layers,
            "draft_vocab_size": shape.draft_vocab_size,
        }


@dataclass
class Eagle3Trainee:
    """EAGLE-3 head in training, on a frozen target."""

    config: TrainConfig
    network: Eagle3Network

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.network.shape.hidden_layers

    def prepare(self, counts: Tensor) -> None:
        """Choose the draft's vocabulary: the most frequent tokens by `counts` [V] over the training data."""
        shape = self.network.shape
        if shape.draft_vocab_size == shape.vocab_size:
            return
        offsets: Tensor = self.network.get_buffer("d2t")
        ids = counts.topk(shape.draft_vocab_size).indices.sort().values.to(offsets.device)
        offsets.copy_(ids - torch.arange(len(ids), device=ids.device))
        _copy_head(self.network, ids)

    def compute_loss(self, trace: Trace) -> Losses:
        first = self.network.project_features(trace.features.to(self.network.norm.weight.dtype))
        total, step_losses = average_step_losses(
            unroll(self.network, trace, first, self.config.steps), self._compute_step_loss, self.config.decay
        )
        return Losses(total, step_losses)

    def _compute_step_loss(self, step: UnrolledStep) -> Tensor:
        log_probs, ids = step.trace.target_log_probs.select(step.target_rows), self.network.token_ids
        if ids is None:
            return average_over_mask(
                compute_draft_loss(self.config.loss, step.logits, log_probs, step.tokens), step.mask
            )
        logits = step.logits.new_full((*step.logits.shape[:-1], self.network.shape.vocab_size), -torch.inf)
        log_q = step.logits.float().log_softmax(-1)
        logits = logits.float().index_copy(-1, ids, log_q).clamp_min(OUT_OF_VOCAB_LOG_PROB)
        return average_over_mask(compute_draft_loss(self.config.loss, logits, log_probs, step.tokens), step.mask)

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and config.json in the layout of the authors."""
        layout = make_layout(self.network.shape, self.network.state_dict())
        return layout.tensors, layout.config | {"base_model_name_or_path": self.network.target[0].name}


def create_trainee(config: TrainConfig, target: HFModel, start: Checkpoint | None = None) -> Eagle3Trainee:
    """Make a head to train, in float32.

    Args:
        config: training settings.
        target: frozen target.
        start: checkpoint to continue from; None = a new head with the target's output matrix.

    Raises:
        ForedraftError: for invalid settings, or a checkpoint that cannot be trained.
    """
    check_loss(config.loss)
    if config.steps < 1 or config.num_layers < 1 or not 0 < config.decay <= 1:
        raise ForedraftError("steps and num_layers must be positive, and decay must be above 0 and at most 1")
    if start is not None:
        if isinstance(start.shape, Eagle3Shape) and start.shape.block.sliding_windows:
            raise ForedraftError(
                f"{start.folder} has sliding-window attention, which training does not support; train without --start"
            )
        return Eagle3Trainee(config, _load_network(start, target).float().to(target.device))
    network = Eagle3Network(_build_shape(config, target), target).to(target.device)
    init_as_identity(network.fc, network.layers)
    _copy_head(network, torch.arange(network.shape.draft_vocab_size))
    return Eagle3Trainee(config, network)


def _build_shape(config: TrainConfig, target: HFModel) -> Eagle3Shape:
    n, size = target.num_layers, config.draft_vocab_size or target.vocab_size
    if n < 2:
        raise ForedraftError(
            f"{target.name} has {n} layer, and EAGLE-3 reads states between layers; train medusa for it"
        )
    layers = _choose_hidden_layers(n) if config.taps is None else tuple(config.taps)
    if sorted(set(layers)) != list(layers) or not layers or layers[0] < 1 or layers[-1] >= n:
        example = ",".join(map(str, _choose_hidden_layers(n)))
        raise ForedraftError(
            f"taps must be different boundaries between 1 and {n - 1} of {target.name}'s {n} layers, ascending "
            f"(--set taps={example}); got {layers}"
        )
    if not 1 <= size <= target.vocab_size:
        raise ForedraftError(f"draft_vocab_size must lie in 1..{target.vocab_size}, got {size}")
    block = replace(
        derive_block_shape(target), max_positions=max(MIN_POSITIONS, derive_block_shape(target).max_positions)
    )
    return Eagle3Shape(block, target.vocab_size, size, target.hidden_size, layers, config.num_layers)


def _choose_hidden_layers(num_layers: int) -> tuple[int, ...]:
    """Return the authors' hidden layers, or evenly spread ones if the target has too few layers for them."""
    published = choose_default_layers(num_layers)
    if is_ascending(published) and published[-1] < num_layers:
        return published
    count, last = min(NUM_DEFAULT_LAYERS, num_layers - 1), num_layers - 1
    if count < 2:
        return (1,)
    return tuple(1 + round(i * (last - 1) / (count - 1)) for i in range(count))


@torch.no_grad()
def _copy_head(network: Eagle3Network, ids: Tensor) -> None:
    """Initialise the head's output matrix with the target's rows of these tokens."""
    weight = network.target[0].head_weight
    network.lm_head.weight.copy_(weight[ids.to(weight.device)])
