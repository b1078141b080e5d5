"""Schema of drafters that were read from checkpoints: one set of names, one meaning for every number."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foredraft.models.draft_layer import DraftLayerShape, make_default_rope


@dataclass(frozen=True)
class TargetInfo:
    """Facts of the target that a drafter's weights are checked against."""

    name: str
    hidden: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True)
class MedusaShape:
    """Tensors: `{h}.{l}.linear.weight` [H, H], `{h}.{l}.linear.bias` [H], and `{h}.{num_layers}.weight` [V, H] of every
    head that has a matrix of its own."""

    hidden: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    has_own_head: bool = True  # False: the target's lm_head serves ("version 2")
    accuracies: tuple[tuple[float, ...], ...] | None = None  # by head and rank, measured when it was trained


@dataclass(frozen=True)
class MlpSpeculatorShape:
    """Tensors: `emb.{i}.weight` [V, inner], `proj.{i}.weight` [inner, H or inner], `ln.{i}.weight` and `.bias` [inner],
    `head.{i}.weight` [V, inner]; with ties only those that differ: 0, and 1 of proj."""

    hidden: int
    inner: int
    vocab_size: int
    n_predict: int
    is_tied: bool = False
    scales_input: bool = False
    branching: tuple[int, ...] | None = None  # top_k_tokens_per_head
    candidates: int | None = None  # n_candidates: whole paths of that tree that are verified; None = all


@dataclass(frozen=True)
class BlockwiseShape:
    """Blockwise parallel decoding. Tensors: `hidden.weight` [inner, H], `hidden.bias` [inner], `output.weight`
    [num_heads * H, inner], `output.bias` [num_heads * H]; head h has the rows from h * H on."""

    hidden: int
    vocab_size: int
    num_heads: int  # beside the target's own
    inner: int  # of all heads together


@dataclass(frozen=True)
class HydraPrefixShape:
    """Hydra's prefix layer: what its weights and config tell; the rest is as in the target, whose layers it is like.

    Its rotary base is 10,000 whatever the target's is, as in the authors' code, unless config.json names another.
    """

    query: int  # rows of q_proj
    key: int  # rows of k_proj and v_proj
    intermediate: int
    rope: dict[str, Any] = field(default_factory=make_default_rope)


@dataclass(frozen=True)
class HydraShape:
    """Hydra. Tensors of head h: `hydra_mlp.{h}.0.linear.weight` and `hydra_mlp.{h}.0.res_connection.weight`
    [H, (h + 2) H], `hydra_mlp.{h}.{l}.linear.weight` [H, H] of later layers, a `.bias` [H] beside each, and
    `hydra_lm_head.{h}.weight` [V, H] and `.bias` [V] where heads have their own. With a rank the first layer is
    [H, rank] and reads `hydra_reduce.{h}.weight` [rank, (h + 2) H] times its input. With a prefix,
    `prefix_embeding_layer.layers.0.*` and `prefix_embeding_layer.norm.weight` [H]."""

    hidden: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    has_own_head: bool = True  # False: the target's lm_head serves
    rank: int | None = None
    offset: int = 0  # which state is read: 0 = the last, after its norm; k = the residual stream k layers before it
    prefix: HydraPrefixShape | None = (
        None  # of a decoder layer over the states ("prefix-mlp"), whose output is read instead
    )


@dataclass(frozen=True)
class EagleShape:
    """EAGLE-1/2. Tensors: `fc.weight` [H, 2H] (embedding first), `fc.bias`, `layers.{i}.*`, `embed_tokens.weight`.
    Layer 0 has no input_layernorm."""

    block: DraftLayerShape
    vocab_size: int
    num_layers: int = 1
    has_fc_bias: bool = False
    has_embedding: bool = False  # own rows for the tokens; otherwise the target's


@dataclass(frozen=True)
class Eagle3Shape:
    """EAGLE-3. Tensors: `fc.weight` [H, taps * H_t], `fc.bias`, `layers.{i}.*` (never `midlayer`), `norm.weight`,
    `lm_head.weight` [Vd, H], `d2t` [Vd] int64 offsets where Vd < V, `embed_tokens.weight`, `input_norm.weight`,
    `fc_norm.{i}.weight`.
    """

    block: DraftLayerShape
    vocab_size: int  # V of the target
    draft_vocab_size: int  # Vd
    target_hidden: int
    hidden_layers: tuple[int, ...]  # boundaries of the target, ascending: k = the residual stream after k layers
    num_layers: int = 1
    has_fc: bool = True
    has_fc_bias: bool = False
    has_embedding: bool = False
    has_own_head: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    has_fc_norm: bool = False
    feeds_normed: bool = False  # a drafted token reads the state before it after the final norm


@dataclass(frozen=True)
class ChimeraShape:
    """Chimera. Tensors: `fc.weight` [H, taps * H] where there are several taps, `trigram.weight` [H, 3H] (oldest token
    first), `join.weight` [H, 2H] (embedding first), `layers.0.*`, `heads.{k}.weight` [H, 2H] (context encoder first)
    and `.bias` [H], `norm.weight` [H]."""

    block: DraftLayerShape
    vocab_size: int
    hidden_layers: tuple[int, ...]  # boundaries of the target, NORMED = the last state, normalised
    num_heads: int = 4

    @property
    def has_fc(self) -> bool:
        return len(self.hidden_layers) > 1

    @property
    def num_layers(self) -> int:
        """Number of layers of the context encoder."""
        return 1


@dataclass(frozen=True)
class EarlyExitShape:
    """An adapter after the target's first layers. Tensors: `norm.weight` [H], `gate_proj.weight` and `up_proj.weight`
    [rank, H], `down_proj.weight` [H, rank]."""

    hidden: int
    rank: int
    exit_layer: int  # boundary of the target that it reads: the residual stream after so many layers


DrafterShape = (
    MedusaShape
    | MlpSpeculatorShape
    | BlockwiseShape
    | HydraShape
    | EagleShape
    | Eagle3Shape
    | ChimeraShape
    | EarlyExitShape
)


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's weights under the names that its shape documents."""

    method: str
    format: str  # for people: whose layout it was
    folder: str
    shape: DrafterShape
    tensors: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=dict)  # as on disk
