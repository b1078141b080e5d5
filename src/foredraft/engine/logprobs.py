"""Log-probabilities of one token, with and without the sampling settings."""

import torch
from torch import Tensor

from foredraft.outputs import TokenLogprob


def compute_token_logprob(logits: Tensor, p: Tensor | None, token: int, count: int) -> TokenLogprob:
    """Compute the log-probability of `token` and of the `count` likeliest tokens.

    Args:
        logits: [V], of the model.
        p: [V], the distribution after all sampling settings. None = the softmax of the logits (prompt tokens).
        token: token whose log-probability is computed.
        count: number of likeliest tokens.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    raw = logits.to(dtype).log_softmax(-1)
    processed = raw if p is None else p.log()
    return TokenLogprob(
        token,
        float(processed[token]),
        float(raw[token]),
        _select_top(processed, count),
        _select_top(raw, count),
    )


def _select_top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Select the likeliest (token, log-probability) pairs, without tokens of probability zero."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple((i, v) for i, v in pairs if v > -torch.inf)
