"""Filters of sampling (top-k, top-p, min-p, typical) as functions of logits and probabilities, row by row.

The tokens that a filter keeps are renormalised. Sorting the vocabulary takes longer than all other operations on a row.
On the CPU a nucleus is therefore searched among tokens above a threshold, and only those are sorted. The result is the
set that a full sort keeps, ties included.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NEG_INF = -math.inf
ScalarOrColumn = Tensor | float  # [R, 1], or one number for all rows
FloatRow = NDArray[np.floating]
# Thresholds above which a nucleus is searched, one after the other, relative to the largest probability.
RELATIVE_THRESHOLDS = (2.0**-6, 2.0**-9, 2.0**-12, 2.0**-16)
SURPRISAL_THRESHOLDS = (
    1.0,
    2.0,
    4.0,
)  # the same for typical sampling: distance of the surprisal from the entropy, nats
MASS_MARGIN = 1e-6  # mass above the required one, so that rounding cannot add a token below the threshold


def compute_greedy_probs(x: Tensor) -> Tensor:
    """Return the one-hot distribution of every row, [R, V]; NaN throughout if the largest logit is not finite."""
    top, index = x.max(-1)
    one = torch.where(top.isfinite(), 1.0, math.nan).to(x.dtype)
    p = torch.zeros_like(x).scatter_(-1, index[:, None], one[:, None])
    return p if bool(top.isfinite().all()) else p + (one - one)[:, None]  # one - one is 0 or NaN, for the whole row


def argmax_tokens(x: Tensor) -> list[int]:
    """Return the argmax of every row; -1 if the largest logit is not finite."""
    if x.device.type != "cpu":
        top, index = x.max(-1)
        return torch.where(top.isfinite(), index, -1).tolist()
    rows = x.detach().numpy()
    index = rows.argmax(-1)  # five times as fast as torch's max over dimension -1; both return the first of equals
    top = rows[np.arange(len(rows)), index]
    return np.where(np.isfinite(top), index, -1).tolist()  # type: ignore[no-any-return]


def keep_top_k(x: Tensor, top_k: Sequence[int]) -> Tensor:
    """Set logits below the k-th largest of their row to -inf. Ties are kept, as in transformers; k = 0 keeps all."""
    size = x.shape[-1]
    counts = [min(k, size) or size for k in top_k]
    largest = max((k for k in counts if k < size), default=0)
    if not largest:
        return x
    sorted_top = x.topk(largest, -1).values
    if counts.count(largest) == len(counts):
        return x.masked_fill(x < sorted_top[:, -1:], NEG_INF)
    index = torch.tensor([min(k, largest) - 1 for k in counts], device=x.device)[:, None]
    floor = sorted_top.gather(-1, index)
    floor = torch.where(torch.tensor([k < size for k in counts], device=x.device)[:, None], floor, NEG_INF)
    return x.masked_fill(x < floor, NEG_INF)


def keep_top_p(p: Tensor, mass: ScalarOrColumn) -> Tensor:
    """Keep the likeliest tokens until their probabilities reach `mass`, the crossing token included.

    Among equal probabilities, lower ids come first.
    """
    return _keep_nucleus(p, mass, p, lambda row: [float(row.max()) * threshold for threshold in RELATIVE_THRESHOLDS])


def keep_min_p(p: Tensor, ratio: ScalarOrColumn) -> Tensor:
    """Keep tokens with at least `ratio` times the largest probability of their row."""
    return renormalise(p, p >= ratio * p.amax(-1, keepdim=True))


def keep_typical(p: Tensor, mass: ScalarOrColumn) -> Tensor:
    """Keep the tokens whose surprisal is nearest to the entropy, until their probabilities reach `mass`.

    Reference: 2202.00666.
    """
    return _keep_nucleus(
        p, mass, -compute_surprisal_gap(p), lambda row: [-threshold for threshold in SURPRISAL_THRESHOLDS]
    )


def select_nucleus(p: Tensor, mass: ScalarOrColumn, rank: Tensor) -> Tensor:
    """Return the first tokens by descending `rank` whose probabilities reach `mass`, as a mask [R, V].

    The crossing token is included. This sorts whole rows: it is slow, and the reference for `_search_nucleus`.
    """
    order = rank.argsort(dim=-1, descending=True, stable=True)
    ordered = p.gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    keep = before < mass
    keep |= torch.as_tensor(mass, device=p.device) >= 1
    keep[..., 0] = True  # a mass that rounds to zero still leaves one token
    return torch.zeros_like(keep).scatter(-1, order, keep)


def compute_surprisal_gap(p: Tensor) -> Tensor:
    """Return |-log p - H| in nats; +inf if p is zero."""
    surprisal = -p.log()
    entropy = torch.where(p > 0, p * surprisal, 0).sum(-1, keepdim=True)
    return (surprisal - entropy).abs()


def renormalise(p: Tensor, keep: Tensor) -> Tensor:
    """Set other tokens to 0 and scale each row to a sum of 1, [R, V].

    A row that keeps all tokens is not divided, so that its bits do not depend on the other rows of the batch.
    """
    p = torch.where(keep | p.isnan(), p, 0)
    return p / torch.where(keep.all(-1, keepdim=True), 1, p.sum(-1, keepdim=True))


def _keep_nucleus(
    p: Tensor, mass: ScalarOrColumn, rank: Tensor, thresholds_of: Callable[[FloatRow], Sequence[float]]
) -> Tensor:
    """Keep the nucleus by descending rank; on the CPU, search above thresholds before sorting a whole row."""
    if p.device.type != "cpu":
        return renormalise(p, select_nucleus(p, mass, rank))
    masses = mass.flatten().tolist() if isinstance(mass, Tensor) else [mass] * len(p)
    result = torch.zeros_like(p)
    for i, (row, ranks, m) in enumerate(zip(p.numpy(), rank.numpy(), masses, strict=True)):
        if m >= 1 or math.isnan(row[0]):  # all tokens are kept, or the row is NaN throughout
            result[i] = p[i]
            continue
        ids = _search_nucleus(row, ranks, m, thresholds_of(ranks))
        if ids is None:
            result[i] = renormalise(p[i : i + 1], select_nucleus(p[i : i + 1], m, rank[i : i + 1]))[0]
            continue
        nucleus = result[i : i + 1]
        nucleus[0].numpy()[ids] = row[ids]
        if len(ids) < len(row):
            nucleus /= nucleus.sum(-1, keepdim=True)
    return result


def _search_nucleus(row: FloatRow, rank: FloatRow, mass: float, thresholds: Sequence[float]) -> NDArray[np.intp] | None:
    """Return the ids that `select_nucleus` keeps of one row; None if the ids above a threshold may not include them.

    The ids above a threshold, stably sorted, are the first part of the whole row stably sorted.
    """
    for threshold in thresholds:
        ids = np.flatnonzero(rank >= threshold)
        if not len(ids) or row[ids].sum() < mass:
            continue
        ids = ids[np.argsort(-rank[ids], kind="stable")]
        probs = row[ids]
        cumulative = np.cumsum(probs, dtype=np.float64).astype(row.dtype)  # torch also accumulates in float64
        if len(ids) == len(row) or cumulative[-1] >= mass + MASS_MARGIN:
            is_kept = cumulative - probs < row.dtype.type(mass)
            is_kept[0] = True
            return ids[is_kept]
    return None
