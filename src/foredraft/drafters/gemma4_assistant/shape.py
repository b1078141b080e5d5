"""Shape of a Gemma-4 assistant."""

from collections.abc import Mapping
from dataclasses import dataclass, field

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class AssistantRope:
    """Rotary parameters of a kind of layers. The frequencies beyond the rotated share of a head are 0."""

    theta: float
    rotated_share: float = 1.0  # of the numbers of a head
    factor: float = 1.0  # divisor of the frequencies


@dataclass(frozen=True)
class AssistantShape:
    """Shape of an assistant.

    Tensors: `pre_projection.weight` [H, 2 B], `layers.{i}.*`, `norm.weight`, `post_projection.weight` [B, H],
    `lm_head.weight` [V, H]; with ordered embeddings `masked_embedding.centroids.weight` [C, H] and
    `masked_embedding.token_ordering` [V]. H is the width of the assistant, B that of the target.
    """

    hidden: int
    target_hidden: int
    vocab_size: int
    intermediate: int
    heads: int
    layer_kinds: tuple[str, ...]  # by layer: the kind of the target's layer whose keys and values it reads
    head_dims: tuple[int, ...]  # by layer
    ropes: Mapping[str, AssistantRope] = field(default_factory=dict)  # by kind of layer
    sliding_window: int = 0  # window of the layers of kind sliding_attention
    eps: float = 1e-6
    num_centroids: int = 0  # C: clusters of tokens with ordered embeddings; 0 = all tokens have logits
    num_selected: int = 0  # clusters whose tokens have logits after a node

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    def get_window(self, layer: int) -> int | None:
        """Return how many of the last keys a layer sees; None = all.

        A key may be `sliding_window` positions before the last key, as in transformers' class.
        """
        return self.sliding_window + 1 if self.layer_kinds[layer] == SLIDING_ATTENTION else None
