"""Shape of an EAGLE-3 head."""

from dataclasses import dataclass

from foredraft.models.draft_layer import DraftLayerShape


@dataclass(frozen=True)
class Eagle3Shape:
    """Shape of an EAGLE-3 head, whose target has hidden size H_t.

    Tensors: `fc.weight` [H, len(hidden_layers) * H_t], `fc.bias`, `layers.{i}.*` (never `midlayer`), `norm.weight`,
    `lm_head.weight` [Vd, H], `d2t` [Vd] int64 offsets if Vd < V, `embed_tokens.weight`, `input_norm.weight`,
    `fc_norm.{i}.weight`, `mask_hidden` [1, 1, len(hidden_layers) * H_t] with a mask token.
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
    # P-EAGLE: token of the rows that stand for draft tokens, beside the learnt state `mask_hidden`; None = drafts of
    # one token after another
    mask_token_id: int | None = None
