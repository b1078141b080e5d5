"""Shape of an MTP layer: how it combines its inputs, and what it feeds back."""

from collections.abc import Mapping
from dataclasses import dataclass

from foredraft.models.draft_layer import DraftLayerShape


@dataclass(frozen=True)
class MtpShape:
    """Flags of an MTP layer. Its sizes are those of the target's decoder layers.

    Tensors: `embedding_norm.weight`, `state_norm.weight`, `projection.weight` [H, 2H], `output_norm.weight`, and
    `layer.*`, the names of the target's class below it.
    """

    hidden: int
    vocab_size: int
    puts_state_first: bool = False  # columns of the projection: state, embedding; otherwise embedding, state
    has_output_norm: bool = True
    zeroes_first: bool = False  # the embedding beside position 0 counts as zeros
    block: DraftLayerShape | None = None  # sizes of the KV cache, once the layer is made; not in a checkpoint
    num_layers: int = 1

    @classmethod
    def from_flags(cls, hidden: int, vocab_size: int, flags: Mapping[str, bool]) -> "MtpShape":
        """Make a shape from the flags by name."""
        return cls(hidden, vocab_size, flags["puts_state_first"], flags["has_output_norm"], flags["zeroes_first"])
