"""Logits of a whole model along the sequences of a trace."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.losses import Trace
from foredraft.source import EncoderSource


def compute_trace_logits(model: Any, trace: Trace) -> Tensor:
    """Compute the logits [B, L, V] after every token of a trace.

    Args:
        model: transformers model: a causal one, or an encoder-decoder model if the trace has sources.
        trace: training sequences.
    """
    tokens = trace.tokens[:, :-1]
    if not trace.sources:
        return model(input_ids=tokens, use_cache=False).logits  # type: ignore[no-any-return]
    source, mask = pad_sources(trace.sources, tokens.device)
    out = model(input_ids=source, attention_mask=mask, decoder_input_ids=tokens, use_cache=False)
    return out.logits  # type: ignore[no-any-return]


def pad_sources(sources: Sequence[EncoderSource], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the token ids [B, S] of sources, padded with 0, and the mask [B, S] of those that are no padding."""
    lengths = torch.tensor([len(source.tokens) for source in sources], device=device)
    rows = [torch.tensor(source.tokens, device=device) for source in sources]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return padded, torch.arange(padded.shape[1], device=device)[None] < lengths[:, None]
