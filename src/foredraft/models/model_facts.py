"""Sizes of a transformers causal LM, read from its modules and its configuration."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

MAX_CONTEXT = 1 << 30  # tokens, for a model without a limit of its own


class ModelFacts:
    """Sizes of `model`, a transformers model."""

    model: Any

    @property
    def vocab_size(self) -> int:
        """Number of tokens V of the logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @cached_property
    def model_context_length(self) -> int:
        """Context limit of the model in tokens. Cached, since transformers reads its configuration slowly."""
        return _find_context_limit(self.model.config.get_text_config())

    @cached_property
    def num_layers(self) -> int:
        """Number of decoder layers. Cached, since transformers reads its configuration slowly."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def device(self) -> torch.device:
        return self.model.device  # type: ignore[no-any-return]

    @cached_property
    def hidden_size(self) -> int:
        """Width H of the hidden states. Cached, since transformers reads its configuration slowly."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def embedding(self) -> Tensor:
        """Input embedding matrix [V, H], unscaled."""
        return self.model.get_input_embeddings().weight.detach()  # type: ignore[no-any-return]


def _find_context_limit(config: Any) -> int:
    """Find the context limit of a configuration in tokens.

    LongRoPE switches its factors at the original context length, by the longest sequence of a batch. Requests of
    one batch would then influence each other, so the context ends at the switch. A mask that keeps the highest of more
    scores than `keep_window_size` breaks ties by the length of the pass: equal tokens have equal scores.
    """
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    sizes = (getattr(config, name, None) or 0 for name in names)
    limit = next((size for size in sizes if size > 0), MAX_CONTEXT)  # XLNet says -1, for no limit
    rope = getattr(config, "rope_parameters", None) or {}
    by_kind = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    switches = [kind["original_max_position_embeddings"] for kind in by_kind if kind.get("rope_type") == "longrope"]
    kept = getattr(config, "keep_window_size", None)
    return int(min([limit, *switches, *([kept] if kept else [])]))
