"""Interpolated modified Kneser-Ney estimation of an n-gram table (Kneser, Ney 1995; Chen, Goodman 1999), in numpy.

Pruning follows Siivola, Hirsimäki, Virpioja, "On Growing and Pruning Kneser-Ney Smoothed N-Gram Models" (2007): an
n-gram that is left out hands its whole count to its suffix, one that stays hands down one. Without it, the lower
orders would be estimated as if the upper ones, now gone, still spoke for the frequent words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ForedraftError
from foredraft.models.ngram import Ints, NgramLevel, NgramModel
from foredraft.models.ngram_counts import Floats

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class NgramSet:
    """The distinct n-grams of one order, by rising (context, token). Links index the order below."""

    context: NDArray[np.int32]  # [G] the n-gram without its last token
    suffix: NDArray[np.int32]  # [G] the n-gram without its first token
    first: NDArray[np.int32]  # [G] its first token
    token: NDArray[np.int32]  # [G] its last token
    count: Ints  # [G] occurrences


@dataclass(frozen=True)
class OrderEstimate:
    """One order of the model."""

    share: Floats  # [G] discounted share of the n-gram in its context; zero where it is left out
    backoff: Floats  # [G of the order below] what a context leaves to the shorter one
    q: Floats  # [G] probability of the token in its context, shorter contexts included


def train(
    ids: Sequence[int] | Ints | Sequence[Sequence[int] | Ints],
    order: int,
    vocab_size: int,
    min_count: int = 1,
    max_entries: int | None = None,
    once_per_sequence: bool = False,
    num_rounds: int = 3,
) -> NgramModel:
    """An n-gram model of one token sequence or of several (no n-gram crosses from one to the next).

    N-grams of two tokens and more that occur fewer than `min_count` times are left out, then those whose loss costs
    the least likelihood, in `num_rounds` rounds, until at most `max_entries` are kept. With `once_per_sequence` an
    n-gram counts the sequences it occurs in: what one text keeps repeating is learnt from that text when it runs.
    Raises ForedraftError if there is nothing to learn from or a token lies outside the vocabulary.
    """
    if order < 1:
        raise ForedraftError(f"the order of an n-gram model is at least 1, got {order}")
    orders = enumerate_ngrams(_read_sequences(ids, vocab_size), order, vocab_size, once_per_sequence)
    kept = [grams.count >= (min_count if n else 0) for n, grams in enumerate(orders)]
    estimates = estimate(orders, kept, vocab_size)
    total = sum(int(k.sum()) for k in kept[1:])
    if max_entries is not None and total > max_entries:
        for left in range(num_rounds - 1, -1, -1):
            # geometric steps: what is least useful now may be needed once much else is gone
            aim = int(max_entries * (total / max(max_entries, 1)) ** (left / num_rounds))
            kept = _prune(orders, kept, estimates, aim)
            estimates = estimate(orders, kept, vocab_size)
    return _build_model(orders, estimates, vocab_size)


def _read_sequences(
    ids: Sequence[int] | Ints | Sequence[Sequence[int] | Ints], vocab_size: int
) -> list[NDArray[np.int64]]:
    many = ids if len(ids) and np.ndim(ids[0]) else [ids]
    arrays = [np.asarray(row, dtype=np.int64) for row in many]
    if sum(map(len, arrays)) == 0:
        raise ForedraftError("an n-gram model needs at least one token to learn from")
    low, high = min(int(a.min(initial=0)) for a in arrays), max(int(a.max(initial=0)) for a in arrays)
    if low < 0 or high >= vocab_size:
        raise ForedraftError(f"token ids lie in {low}..{high}, outside the vocabulary of {vocab_size}")
    return arrays


def enumerate_ngrams(
    sequences: Sequence[Ints], order: int, vocab_size: int, once_per_sequence: bool = False
) -> list[NgramSet]:
    """[n]: the distinct (n + 1)-grams; every token of the vocabulary is a 1-gram."""
    ids = np.concatenate(sequences)
    lengths = [len(s) for s in sequences]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    room = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(ids))

    def occurrences(grams: Ints, owners: Ints, size: int) -> Ints:
        if once_per_sequence:
            grams = np.unique(grams * len(lengths) + owners) // len(lengths)
        return np.bincount(grams, minlength=size)

    zeros, every = np.zeros(vocab_size, dtype=np.int32), np.arange(vocab_size, dtype=np.int32)
    orders = [NgramSet(zeros, zeros, every, every, occurrences(ids, owner, vocab_size))]
    at = ids.astype(np.int32)  # [i]: index of the n-gram that starts at position i
    for n in range(2, order + 1):
        places = np.flatnonzero(room >= n)
        keys = at[places].astype(np.int64) * vocab_size + ids[places + n - 1]
        distinct, where, inverse = np.unique(keys, return_index=True, return_inverse=True)
        context = (distinct // vocab_size).astype(np.int32)
        suffix = at[places[where] + 1]
        token = (distinct % vocab_size).astype(np.int32)
        count = occurrences(inverse, owner[places], len(distinct))
        orders.append(NgramSet(context, suffix, orders[-1].first[context], token, count))
        at[places] = inverse
    return orders


def estimate(orders: Sequence[NgramSet], keep_masks: Sequence[Bools], vocab_size: int) -> list[OrderEstimate]:
    """Shares, back-off weights and probabilities of every order, given which n-grams are kept."""
    result: list[OrderEstimate] = []
    for grams, counts, keep in zip(orders, adjust_counts(orders, keep_masks), keep_masks, strict=True):
        num_contexts = len(result[-1].q) if result else 1
        totals = np.bincount(grams.context, weights=counts, minlength=num_contexts)
        lowered = counts - compute_discounts(counts)[np.minimum(counts, 3)]
        share = np.where(keep & (lowered > 0), lowered / np.maximum(totals, 1)[grams.context], 0.0)
        backoff = 1.0 - np.bincount(grams.context, weights=share, minlength=num_contexts).astype(np.float64)
        below = result[-1].q[grams.suffix] if result else np.full(vocab_size, 1 / vocab_size)
        result.append(OrderEstimate(share, backoff, share + backoff[grams.context] * below))
    return result


def adjust_counts(orders: Sequence[NgramSet], keep_masks: Sequence[Bools]) -> list[Ints]:
    """Occurrences at the highest order; below it one for every kept n-gram that ends so, and the whole count of
    every one left out. With nothing left out these are the continuation counts of Kneser and Ney."""
    counts = [orders[-1].count]
    for n in range(len(orders) - 1, 0, -1):
        handed = np.where(keep_masks[n] & (counts[0] > 0), np.minimum(counts[0], 1), counts[0])
        below = np.bincount(orders[n].suffix, weights=handed, minlength=len(orders[n - 1].count))
        counts.insert(0, below.astype(np.int64))
    return counts


def compute_discounts(counts: Ints) -> Floats:
    """[4]: what is taken from a count of 0, 1, 2, and 3 or more (Chen and Goodman, equation 26)."""
    n = np.bincount(np.minimum(counts, 5), minlength=6).astype(np.float64)
    if not n[1:5].all():  # too little text for the formula
        return np.array([0.0, 0.5, 1.0, 1.5])
    y = n[1] / (n[1] + 2 * n[2])
    taken = [0.0, *(k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))]
    lowered: Floats = np.clip(np.array(taken), 0.0, np.arange(4.0))
    return lowered


def _prune(
    orders: Sequence[NgramSet], keep_masks: Sequence[Bools], estimates: Sequence[OrderEstimate], max_entries: int
) -> list[Bools]:
    losses = [_compute_losses(orders, keep_masks, estimates, n) for n in range(1, len(orders))]
    every = np.concatenate([loss[keep] for loss, keep in zip(losses, keep_masks[1:], strict=True)])
    if len(every) <= max_entries:
        return list(keep_masks)
    bar = np.partition(every, len(every) - max_entries - 1)[len(every) - max_entries - 1]
    return [keep_masks[0], *[keep & (loss > bar) for loss, keep in zip(losses, keep_masks[1:], strict=True)]]


def _compute_losses(
    orders: Sequence[NgramSet], keep_masks: Sequence[Bools], estimates: Sequence[OrderEstimate], n: int
) -> Floats:
    """[G] nats of training text that leaving out an n-gram alone would cost (Stolcke cs/0006025, for interpolation).

    Its share moves to the back-off weight. The n-gram itself loses; whatever its context leaves to shorter ones gains.
    """
    grams, now, keep = orders[n], estimates[n], keep_masks[n]
    seen = orders[n - 1].count[grams.context]  # occurrences of the context
    below = estimates[n - 1].q[grams.suffix]
    backoff = now.backoff[grams.context]
    explicit = np.bincount(grams.context, weights=np.where(keep, now.q, 0), minlength=len(now.backoff))
    others = (1 - explicit).clip(0)[grams.context]
    after = (backoff + now.share).clip(1e-12)
    lost = now.q * np.log(now.q / (after * below))
    gained = others * np.log(after / backoff.clip(1e-12))
    return np.where(keep & (now.share > 0), seen * (lost - gained), -np.inf)


def _build_model(orders: Sequence[NgramSet], estimates: Sequence[OrderEstimate], vocab_size: int) -> NgramModel:
    """The kept n-grams as a table: a context is there if something is kept after it or after a longer one."""
    highest = len(orders) - 1
    wanted = [np.zeros(len(grams.count), dtype=bool) for grams in orders]
    for n in range(highest, 0, -1):
        wanted[n - 1][orders[n].context[estimates[n].share > 0]] = True
        wanted[n - 1][orders[n].suffix[wanted[n]]] = True
    levels: list[NgramLevel] = []
    above = np.zeros(1, dtype=np.int64)  # place of every gram of the order below among the contexts of its level
    for n in range(highest):
        grams, share = orders[n], estimates[n + 1].share
        chosen = np.flatnonzero(wanted[n])
        if not len(chosen):
            break
        chosen = chosen[np.lexsort((grams.first[chosen], above[grams.suffix[chosen]]))]
        place = np.full(len(grams.count), -1, dtype=np.int64)
        place[chosen] = np.arange(len(chosen))
        entries = np.flatnonzero(share > 0)
        owner = place[orders[n + 1].context[entries]]
        by_owner = np.argsort(owner, kind="stable")
        entries = entries[by_owner]
        levels.append(
            NgramLevel(
                above[grams.suffix[chosen]],
                grams.first[chosen].astype(np.int64),
                np.bincount(owner, minlength=len(chosen)),
                orders[n + 1].token[entries].astype(np.int64),
                share[entries],
            )
        )
        above = place
    return NgramModel(estimates[0].q, tuple(levels))
