"""Loss and acceptance of a draft model against its target on held-out text."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

MAX_DRAFT_TOKENS = 8  # largest draft length K in the figures


@dataclass(frozen=True)
class PairMetrics:
    """Means over held-out positions; p is the target's distribution, q the draft model's, both at temperature 1."""

    target_loss: float  # nats per token
    draft_loss: float  # nats per token
    alpha: float  # mean of sum min(p, q): the acceptance rate of one draft token under `reject`
    greedy_agreement: float  # share of positions at which both models have the same likeliest token
    lengths: tuple[float, ...]  # expected acceptance length for K = 1..8, bonus included, along the held-out text
    greedy_lengths: tuple[float, ...]  # expected acceptance length of greedy decoding for K = 1..8
    num_tokens: int  # measured positions

    def predict_length(self, tokens: int) -> float:
        """Return the expected acceptance length of `tokens` draft tokens, each accepted independently.

        Reference:
            arXiv 2211.17192: (1 - alpha^(K+1)) / (1 - alpha).
        """
        return (1 - self.alpha ** (tokens + 1)) / (1 - self.alpha)


@torch.inference_mode()
def compute_logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of one window of token ids [L], as [L, V] float32."""
    return model(ids[None], use_cache=False).logits[0].float()  # type: ignore[no-any-return]


@torch.inference_mode()
def measure_pair(target: Any, draft: Any, ids: np.ndarray, context: int = 256, windows: int = 120) -> PairMetrics:
    """Measure a draft model on evenly spaced windows of held-out text, without generation.

    Args:
        target: transformers model of the target.
        draft: transformers model of the draft model.
        ids: held-out token ids, [T].
        context: tokens per window. Default 256.
        windows: number of windows. Default 120.
    """
    starts = np.linspace(0, len(ids) - context - 1, windows).astype(int)
    overlap, agree, target_loss, draft_loss = [], [], [], []
    for start in starts:
        window = torch.from_numpy(ids[start : start + context + 1].astype(np.int64))
        p, q = compute_logits(target, window[:-1]), compute_logits(draft, window[:-1])
        target_loss.append(F.cross_entropy(p, window[1:]))
        draft_loss.append(F.cross_entropy(q, window[1:]))
        overlap.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1))
        agree.append((p.argmax(-1) == q.argmax(-1)).float())
    rates, greedy = torch.stack(overlap), torch.stack(agree)  # [W, L]
    return PairMetrics(
        target_loss=float(torch.stack(target_loss).mean()),
        draft_loss=float(torch.stack(draft_loss).mean()),
        alpha=float(rates.mean()),
        greedy_agreement=float(greedy.mean()),
        lengths=_compute_lengths(rates),
        greedy_lengths=_compute_lengths(greedy),
        num_tokens=rates.numel(),
    )


def _compute_lengths(rates: Tensor) -> tuple[float, ...]:
    """Return the expected acceptance length for K = 1..8 from acceptance probabilities by window and position, [W, L].

    The length at a position is 1 plus the sum of the running products over the next K probabilities.
    """
    result, survival, total = [], torch.ones_like(rates), torch.ones_like(rates)
    for k in range(MAX_DRAFT_TOKENS):
        survival = survival * rates.roll(-k, 1)
        total = total + survival
        result.append(float(total[:, : rates.shape[1] - MAX_DRAFT_TOKENS].mean()))
    return tuple(result)
