"""Filters of sampling (top-k, top-p, min-p, typical) as functions of logits and weights, row by row.

A filter sets the weights of other tokens to 0; `distribution` divides by the sum once, after the last filter. Sorting
the vocabulary takes longer than all other operations on a row. On the CPU a nucleus is therefore searched among tokens
above a threshold, and only those are sorted. The result is the set that a full sort keeps, ties included.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.sampling.weights import count_units, to_summands

NEG_INF = -math.inf
FloatRow = NDArray[np.floating]
# Thresholds above which a nucleus is searched, one after the other, relative to the largest weight.
RELATIVE_THRESHOLDS = (2.0**-6, 2.0**-9, 2.0**-12, 2.0**-16)
# The same for typical sampling: distance of the surprisal from the entropy, negative, in bits.
SURPRISAL_THRESHOLDS = (-1.5, -3.0, -6.0)
MASS_MARGIN = 1e-6  # share above the required one in float64, so that rounding cannot add a token below the threshold


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


def keep_top_p(w: Tensor, masses: Sequence[float]) -> Tensor:
    """Keep the heaviest tokens until their share of the row reaches its mass, the crossing token included.

    Among equal weights, lower ids come first.
    """
    return _keep_nucleus(w, masses, w, RELATIVE_THRESHOLDS)


def keep_min_p(w: Tensor, ratios: Sequence[float] | Tensor) -> Tensor:
    """Keep tokens with at least this ratio of the largest weight, which is 1."""
    return torch.where(w.double() >= _build_column(ratios, w.device), w, 0)


def keep_typical(w: Tensor, exponents: Tensor, masses: Sequence[float]) -> Tensor:
    """Keep the tokens whose surprisal is nearest to the entropy, until their share of the row reaches its mass.

    Reference: 2202.00666.
    """
    return _keep_nucleus(w, masses, -compute_surprisal_gap(w, exponents), SURPRISAL_THRESHOLDS)


def select_nucleus(w: Tensor, masses: Sequence[float] | Tensor, rank: Tensor) -> Tensor:
    """Return the first tokens by descending `rank` whose weights reach a share of the row, as a mask [R, V].

    The crossing token is included. This sorts whole rows: it is slow, and the reference for `_search_nucleus` and for
    the native sampler.
    """
    order = rank.argsort(dim=-1, descending=True, stable=True)
    mass = _build_column(masses, w.device)
    ordered = to_summands(w).gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    keep = before < _compute_limit(mass, to_summands(w).sum(-1, keepdim=True))
    keep |= mass >= 1
    keep[..., 0] = True  # a mass that rounds to zero still leaves one token
    return torch.zeros_like(keep).scatter(-1, order, keep)


def compute_surprisal_gap(w: Tensor, exponents: Tensor) -> Tensor:
    """Return the distance of every surprisal from the entropy, in bits, [R, V]; +inf for a token without a logit.

    A surprisal is log2(sum of weights) - exponent, and the entropy is the mean of it, so the sum cancels.
    """
    products = torch.where(w > 0, w.double() * exponents.double(), 0)
    if w.dtype == torch.float32:
        total, products = to_summands(w).sum(-1, keepdim=True).double(), count_units(products)
    else:
        total = w.sum(-1, keepdim=True)
    mean = products.sum(-1, keepdim=True).double() / total
    return (exponents - mean.to(w.dtype)).abs()


def _build_column(values: Sequence[float] | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64, device=device)[:, None]


def _compute_limit(mass: Tensor, total: Tensor) -> Tensor:
    """Return the sum that the tokens of a nucleus reach: [R, 1] of the dtype of `total`, the sum of a row."""
    if total.dtype == torch.int64:
        return (mass * total.double()).ceil().to(torch.int64)
    return mass * total


def _keep_nucleus(w: Tensor, masses: Sequence[float], rank: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Keep the nucleus by descending rank; on the CPU, search above thresholds before sorting a whole row."""
    if w.device.type != "cpu":
        return torch.where(select_nucleus(w, masses, rank), w, 0)
    summands = to_summands(w)
    limits = _compute_limit(_build_column(masses, w.device), summands.sum(-1, keepdim=True)).flatten().tolist()
    result = torch.zeros_like(w)
    for i, (mass, limit) in enumerate(zip(masses, limits, strict=True)):
        if mass >= 1:
            result[i] = w[i]
            continue
        ids = _search_nucleus(summands[i].numpy(), rank[i].numpy(), limit, thresholds)
        if ids is None:
            keep = select_nucleus(w[i : i + 1], [mass], rank[i : i + 1])[0]
            result[i] = torch.where(keep, w[i], 0)
        else:
            result[i].numpy()[ids] = w[i].numpy()[ids]
    return result


def _search_nucleus(
    summands: NDArray[np.number], rank: FloatRow, limit: float, thresholds: Sequence[float]
) -> NDArray[np.intp] | None:
    """Return the ids that `select_nucleus` keeps of one row; None if the ids above a threshold may not include them.

    The ids above a threshold, stably sorted, are the first part of the whole row stably sorted.
    """
    for threshold in thresholds:
        ids = np.flatnonzero(rank >= threshold)
        if not len(ids) or summands[ids].sum() < limit:
            continue
        ids = ids[np.argsort(-rank[ids], kind="stable")]
        terms = summands[ids]
        cumulative = np.cumsum(terms)
        margin = 0 if terms.dtype == np.int64 else MASS_MARGIN * limit
        if cumulative[-1] >= limit + margin:
            is_kept = cumulative - terms < limit
            is_kept[0] = True
            kept: NDArray[np.intp] = ids[is_kept]
            return kept
    return None
