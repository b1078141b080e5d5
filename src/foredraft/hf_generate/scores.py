"""Scores and logits of finished sequences, as `generate(output_scores=True)` returns them.

They come from one forward pass of the model over the finished sequences, so verification stays as it is. They agree
with plain generate() to the rounding of the dtype.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScoredOutputs:
    """Scores and logits of new tokens, None if not requested."""

    scores: tuple[Tensor, ...] | None = None  # per new token [B, V], after processors
    logits: tuple[Tensor, ...] | None = None  # per new token [B, V], as the model gave them


@torch.no_grad()
def score_sequences(
    model: Any,
    sequences: Tensor,  # [B, L + N]
    prompt_length: int,
    processors: Any,
    config: Any,
    mask: Tensor | None,  # [B, L], or of the encoder
    encoder_outputs: Any,
) -> ScoredOutputs:
    """Compute the scores that `config` asks for."""
    inputs = sequences[:, :-1]
    if encoder_outputs is None:
        tail = sequences.shape[1] - 1 - prompt_length
        whole = torch.ones_like(sequences[:, :prompt_length]) if mask is None else mask
        whole = torch.cat([whole, whole.new_ones(len(whole), tail)], 1)
        positions = (whole.long().cumsum(-1) - 1).clamp_min(0)
        out = model(input_ids=inputs, attention_mask=whole, position_ids=positions, use_cache=False)
    else:
        out = model(decoder_input_ids=inputs, encoder_outputs=encoder_outputs, attention_mask=mask, use_cache=False)
    new = out.logits[:, prompt_length - 1 :].float().unbind(1)
    scores = None
    if config.output_scores:
        scores = tuple(processors(sequences[:, : prompt_length + i], row.clone()) for i, row in enumerate(new))
    return ScoredOutputs(scores, tuple(new) if config.output_logits else None)
