"""Shape of a DFlash head."""

from dataclasses import dataclass

from foredraft.models.draft_layer import DraftLayerShape

DEFAULT_MARKOV = "vanilla"  # type of a Markov head


@dataclass(frozen=True)
class DFlashShape:
    """Shape of a DFlash head. It has the width H of its target, whose embedding and output matrix it uses.

    Tensors: `fc.weight` [H, len(hidden_layers) * H], `hidden_norm.weight`, `layers.{i}.*`, `norm.weight`; with a Markov
    head `markov_head.*`, with a confidence head `confidence_head.proj.*`.
    """

    block: DraftLayerShape
    vocab_size: int
    hidden_layers: tuple[int, ...]  # boundaries of the target: k = the residual stream after k layers
    num_layers: int
    block_size: int  # S, rows of a block: the root and S - 1 masks
    mask_token_id: int  # token whose embedding stands for a token to draft
    causal_layers: tuple[bool, ...] = ()  # by layer: whether a row sees no later row of its block; () = all see all
    has_anchor_output: bool = False  # row j predicts the token after its position, otherwise the token at its position
    markov_rank: int = 0  # r of a Markov head (DSpark); 0 = none
    markov_type: str = DEFAULT_MARKOV  # name in `markov.MARKOV_HEADS`
    has_confidence: bool = False  # the head predicts the acceptance of its rows (DSpark)
    confidence_reads_token: bool = False  # it reads the Markov head's embedding of the token before, too

    @property
    def first_row(self) -> int:
        """First row of a block that predicts a token: the root, or the first mask."""
        return 0 if self.has_anchor_output else 1

    @property
    def max_depth(self) -> int:
        """Number of tokens that a block predicts."""
        return self.block_size - self.first_row

    def is_causal(self, layer: int) -> bool:
        """Return whether a row of this layer sees no later row of its block."""
        return bool(self.causal_layers) and self.causal_layers[layer]
