"""The filters of sampling as functions of logits and probabilities, row by row; what is kept is renormalised.

Sorting the vocabulary costs more than everything else that happens to a law, so nothing here does so unless it must.
On the CPU a nucleus is searched among the likeliest tokens, which are found by comparison, and only those are sorted;
the set that is kept is the one a full sort would keep, to the last tie.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NEVER = -math.inf
Column = Tensor | float  # one number for every row, or one for all of them
Row = NDArray[np.floating]
RELATIVE_BARS = (
    2.0**-6,
    2.0**-9,
    2.0**-12,
    2.0**-16,
)  # of the largest probability: where a nucleus is searched, in turn
SURPRISE_BARS = (1.0, 2.0, 4.0)  # nats from the entropy: the same for locally typical sampling
SURE = 1e-6  # mass beyond the one asked for, so that rounding cannot bring in a token below the bar


def one_hot(x: Tensor) -> Tensor:
    """[R, V] the greedy law of shaped logits; a row whose largest is not finite has none, and is NaN throughout."""
    top, index = x.max(-1)
    one = torch.where(top.isfinite(), 1.0, math.nan).to(x.dtype)
    p = torch.zeros_like(x).scatter_(-1, index[:, None], one[:, None])
    return p if bool(top.isfinite().all()) else p + (one - one)[:, None]  # NaN spreads over its row


def likeliest(x: Tensor) -> list[int]:
    """The token of every row's greedy law without the law itself; -1 where there is none."""
    if x.device.type != "cpu":
        top, index = x.max(-1)
        return torch.where(top.isfinite(), index, -1).tolist()
    rows = x.detach().numpy()
    index = rows.argmax(
        -1
    )  # numpy's is five times as fast as a maximum over dimension -1, with the same first of equals
    top = rows[np.arange(len(rows)), index]
    return np.where(np.isfinite(top), index, -1).tolist()  # type: ignore[no-any-return]


def keep_top_k(x: Tensor, top_k: Sequence[int]) -> Tensor:
    """Logits below the k-th largest become -inf; ties with it are kept, as in transformers. 0 keeps all."""
    size = x.shape[-1]
    wanted = [min(k, size) or size for k in top_k]
    largest = max((k for k in wanted if k < size), default=0)
    if not largest:
        return x
    sorted_top = x.topk(largest, -1).values
    if wanted.count(largest) == len(wanted):
        return x.masked_fill(x < sorted_top[:, -1:], NEVER)
    index = torch.tensor([min(k, largest) - 1 for k in wanted], device=x.device)[:, None]
    floor = sorted_top.gather(-1, index)
    floor = torch.where(torch.tensor([k < size for k in wanted], device=x.device)[:, None], floor, NEVER)
    return x.masked_fill(x < floor, NEVER)


def keep_top_p(p: Tensor, mass: Column) -> Tensor:
    """The likeliest tokens whose probabilities reach `mass`, the crossing one included; of equals the lower ids."""
    return _keep_nucleus(p, mass, p, lambda row: [float(row.max()) * bar for bar in RELATIVE_BARS])


def keep_min_p(p: Tensor, share: Column) -> Tensor:
    """Tokens at least `share` times as likely as the likeliest."""
    return renormalised(p, p >= share * p.amax(-1, keepdim=True))


def keep_typical(p: Tensor, mass: Column) -> Tensor:
    """The tokens whose surprise is nearest to the entropy, until they reach `mass` (2202.00666)."""
    return _keep_nucleus(p, mass, -surprise_gap(p), lambda row: [-bar for bar in SURPRISE_BARS])


def nucleus(p: Tensor, mass: Column, rank: Tensor) -> Tensor:
    """[R, V] bool: the first tokens by falling `rank` whose probabilities reach `mass`, the crossing one included.

    Sorts whole rows: the slow way, and the reference for the other one.
    """
    order = rank.argsort(dim=-1, descending=True, stable=True)
    ordered = p.gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    keep = before < mass
    keep |= torch.as_tensor(mass, device=p.device) >= 1
    keep[..., 0] = True  # a mass that rounds to zero still leaves one token
    return torch.zeros_like(keep).scatter(-1, order, keep)


def surprise_gap(p: Tensor) -> Tensor:
    """|-log p - H| of locally typical sampling; +inf where p is zero."""
    surprise = -p.log()
    entropy = torch.where(p > 0, p * surprise, 0).sum(-1, keepdim=True)
    return (surprise - entropy).abs()


def renormalised(p: Tensor, keep: Tensor) -> Tensor:
    """[R, V] what is kept, scaled to one. A row that loses nothing is not divided: its bits may not depend on the
    other rows of the batch."""
    p = torch.where(keep | p.isnan(), p, 0)
    return p / torch.where(keep.all(-1, keepdim=True), 1, p.sum(-1, keepdim=True))


def _keep_nucleus(p: Tensor, mass: Column, rank: Tensor, bars: Callable[[Row], Sequence[float]]) -> Tensor:
    """The nucleus by falling rank, searched above one bar after the other before a row is sorted whole."""
    if p.device.type != "cpu":
        return renormalised(p, nucleus(p, mass, rank))
    masses = mass.flatten().tolist() if isinstance(mass, Tensor) else [mass] * len(p)
    result = torch.zeros_like(p)
    for i, (row, ranks, m) in enumerate(zip(p.numpy(), rank.numpy(), masses, strict=True)):
        if m >= 1 or math.isnan(row[0]):  # all of it, or no law: that is NaN throughout
            result[i] = p[i]
            continue
        ids = _search(row, ranks, m, bars(ranks))
        if ids is None:
            result[i] = renormalised(p[i : i + 1], nucleus(p[i : i + 1], m, rank[i : i + 1]))[0]
            continue
        kept = result[i : i + 1]
        kept[0].numpy()[ids] = row[ids]
        if len(ids) < len(row):
            kept /= kept.sum(-1, keepdim=True)
    return result


def _search(row: Row, rank: Row, mass: float, bars: Sequence[float]) -> NDArray[np.intp] | None:
    """The ids `nucleus` keeps of one row; None if those above the bars do not surely hold them all.

    All above a bar, sorted with ties in order, are the beginning of the whole row so sorted.
    """
    for bar in bars:
        ids = np.flatnonzero(rank >= bar)
        if not len(ids) or row[ids].sum() < mass:
            continue
        ids = ids[np.argsort(-rank[ids], kind="stable")]
        kept = row[ids]
        reached = np.cumsum(kept, dtype=np.float64).astype(row.dtype)  # torch, too, accumulates in double
        if len(ids) == len(row) or reached[-1] >= mass + SURE:
            is_kept = reached - kept < row.dtype.type(mass)
            is_kept[0] = True
            return ids[is_kept]
    return None
