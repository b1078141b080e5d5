"""Schema of drafters that were read from checkpoints: one set of tensor names and one meaning for every number."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foredraft.models.draft_layer import DraftLayerShape, make_default_rope


@dataclass(frozen=True)
class TargetInfo:
    """Sizes of the target that a drafter is checked against."""

    name: str
    hidden: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True)
class MedusaShape:
    """Shape of Medusa heads.

    Tensors: `{h}.{l}.linear.weight` [H, H], `{h}.{l}.linear.bias` [H], and `{h}.{num_layers}.weight` [V, H] of every
    head if heads have their own output matrix.
    """

    hidden: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    has_own_head: bool = True  # False: heads use the target's lm_head ("version 2")
    accuracies: tuple[tuple[float, ...], ...] | None = None  # by head and rank, measured in training


@dataclass(frozen=True)
class MlpSpeculatorShape:
    """Shape of an MLP speculator.

    Tensors: `emb.{i}.weight` [V, inner], `proj.{i}.weight` [inner, H or inner], `ln.{i}.weight` and `.bias` [inner],
    `head.{i}.weight` [V, inner]. With tied weights only step 0 is stored, and step 1 of proj.
    """

    hidden: int
    inner: int
    vocab_size: int
    n_predict: int
    is_tied: bool = False
    scales_input: bool = False
    branching: tuple[int, ...] | None = None  # top_k_tokens_per_head
    candidates: int | None = None  # n_candidates: paths of the tree that are verified; None = all


@dataclass(frozen=True)
class BlockwiseShape:
    """Shape of blockwise parallel decoding heads.

    Tensors: `hidden.weight` [inner, H], `hidden.bias` [inner], `output.weight` [num_heads * H, inner], `output.bias`
    [num_heads * H]. Head h has the rows from h * H to (h + 1) * H.
    """

    hidden: int
    vocab_size: int
    num_heads: int  # without the target's own lm_head
    inner: int  # width of all heads together


@dataclass(frozen=True)
class HydraPrefixShape:
    """Shape of Hydra's prefix layer, as far as its weights and config.json determine it.

    The other sizes are those of the target's layers. The rotary base is 10,000 for any target, as in the authors' code,
    unless config.json sets another.
    """

    query: int  # rows of q_proj
    key: int  # rows of k_proj and v_proj
    intermediate: int
    rope: dict[str, Any] = field(default_factory=make_default_rope)


@dataclass(frozen=True)
class HydraShape:
    """Shape of Hydra heads.

    Tensors of head h: `hydra_mlp.{h}.0.linear.weight` and `hydra_mlp.{h}.0.res_connection.weight` [H, (h + 2) H],
    `hydra_mlp.{h}.{l}.linear.weight` [H, H] of later layers, a `.bias` [H] beside each, and `hydra_lm_head.{h}.weight`
    [V, H] and `.bias` [V] if heads have their own output matrix. With a rank, the first layer is [H, rank] and reads
    `hydra_reduce.{h}.weight` [rank, (h + 2) H] times its input. A prefix layer adds `prefix_embeding_layer.norm.weight`
    [H] and `prefix_embeding_layer.layers.0.*`.
    """

    hidden: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    has_own_head: bool = True  # False: heads use the target's lm_head
    rank: int | None = None  # width of the input projection; None = no projection
    offset: int = 0  # state that heads read: 0 = the last, after the norm; k = the residual stream k layers before it
    prefix: HydraPrefixShape | None = None  # decoder layer over the states ("prefix-mlp"); heads read its output


@dataclass(frozen=True)
class EagleShape:
    """Shape of an EAGLE-1/2 head.

    Tensors: `fc.weight` [H, 2H] (embedding first), `fc.bias`, `layers.{i}.*`, `embed_tokens.weight`. Layer 0 has no
    input_layernorm.
    """

    block: DraftLayerShape
    vocab_size: int
    num_layers: int = 1
    has_fc_bias: bool = False
    has_embedding: bool = False  # False: the head uses the target's embedding


@dataclass(frozen=True)
class Eagle3Shape:
    """Shape of an EAGLE-3 head, whose target has hidden size H_t.

    Tensors: `fc.weight` [H, len(hidden_layers) * H_t], `fc.bias`, `layers.{i}.*` (never `midlayer`), `norm.weight`,
    `lm_head.weight` [Vd, H], `d2t` [Vd] int64 offsets if Vd < V, `embed_tokens.weight`, `input_norm.weight`,
    `fc_norm.{i}.weight`.
    """

    block: DraftLayerShape
    vocab_size: int  # V, vocabulary of the target
    draft_vocab_size: int  # Vd, tokens that can be drafted
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
    feeds_normed: bool = False  # a draft token reads the previous state after the final norm


@dataclass(frozen=True)
class ChimeraShape:
    """Shape of Chimera heads.

    Tensors: `fc.weight` [H, len(hidden_layers) * H] if there are several hidden layers, `trigram.weight` [H, 3H]
    (oldest token first), `join.weight` [H, 2H] (embedding first), `layers.0.*`, `heads.{k}.weight` [H, 2H] (context
    encoder first) and `.bias` [H], `norm.weight` [H].
    """

    block: DraftLayerShape
    vocab_size: int
    hidden_layers: tuple[int, ...]  # boundaries of the target; AFTER_FINAL_NORM = the last state, normalised
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
    """Shape of an adapter after the first layers of the target.

    Tensors: `norm.weight` [H], `gate_proj.weight` and `up_proj.weight` [rank, H], `down_proj.weight` [H, rank].
    """

    hidden: int
    rank: int
    exit_layer: int  # the adapter reads the residual stream after this many layers of the target


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
    """Weights of a drafter, under the names that its shape's class documents."""

    method: str
    format: str  # name of the layout, for messages
    folder: str
    shape: DrafterShape
    tensors: dict[str, Tensor]
    config: dict[str, Any] = field(default_factory=dict)  # config.json as on disk
