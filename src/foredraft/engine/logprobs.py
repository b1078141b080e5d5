"""Log-probabilities of one token, under the law it was drawn from and under the model's own."""

import torch
from torch import Tensor

from foredraft.completion import TokenLogprob


def token_logprob(logits: Tensor, p: Tensor | None, token: int, count: int) -> TokenLogprob:
    """From one row of logits [V] and its law [V]; without a law (prompt tokens) the model's own stands for both."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    raw = logits.to(wide).log_softmax(-1)
    law = raw if p is None else p.log()
    return TokenLogprob(token, float(law[token]), float(raw[token]), _top(law, count), _top(raw, count))


def _top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens; those of probability zero are left out."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return tuple((i, v) for i, v in pairs if v > -torch.inf)
