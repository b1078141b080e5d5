"""Interpolated modified Kneser-Ney estimation of an n-gram table (Kneser, Ney 1995; Chen, Goodman 1999), in numpy.

Pruning follows Siivola, Hirsimäki, Virpioja, "On Growing and Pruning Kneser-Ney Smoothed N-Gram Models" (2007). A
pruned n-gram adds its whole count to its suffix, any other n-gram adds one. Without this correction the lower orders
would lack the counts of frequent n-grams that are no longer stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.ngram_lm.counts import Floats
from foredraft.drafters.ngram_lm.table import Ints, NgramLevel, NgramModel
from foredraft.errors import ForedraftError

Bools = NDArray[np.bool_]
MAX_DISCOUNT_COUNT = 3  # counts from this one on share a discount (Chen and Goodman)
DEFAULT_DISCOUNTS = (0.0, 0.5, 1.0, 1.5)  # if there is too little text to estimate them
MIN_BACKOFF = 1e-12  # lower bound of back-off weights in logarithms


@dataclass(frozen=True)
class NgramSet:
    """The G distinct n-grams of one order, sorted by (context, token). `context` and `suffix` index the order below."""

    context: NDArray[np.int32]  # [G] the n-gram without its last token
    suffix: NDArray[np.int32]  # [G] the n-gram without its first token
    first: NDArray[np.int32]  # [G] first token
    token: NDArray[np.int32]  # [G] last token
    count: Ints  # [G] number of occurrences


@dataclass(frozen=True)
class OrderEstimate:
    """Estimated probabilities of one order."""

    share: Floats  # [G] discounted share of the n-gram in its context; zero if it is pruned
    backoff: Floats  # [G of the order below] probability that a context leaves to the shorter context
    q: Floats  # [G] probability of the token in its context, with the back-off to shorter contexts


def train(
    ids: Sequence[int] | Ints | Sequence[Sequence[int] | Ints],
    order: int,
    vocab_size: int,
    min_count: int = 1,
    max_entries: int | None = None,
    once_per_sequence: bool = False,
    num_rounds: int = 3,
) -> NgramModel:
    """Train an n-gram model on one token sequence or on several. No n-gram spans two sequences.

    Args:
        ids: token ids of one sequence or of several.
        order: maximum number of tokens of an n-gram, at least 1.
        vocab_size: vocabulary size V.
        min_count: n-grams of two or more tokens with fewer occurrences are pruned. Default 1.
        max_entries: n-grams of two or more tokens to store at most; those with the least loss of likelihood are
            pruned. Default None = no limit.
        once_per_sequence: whether an n-gram counts once per sequence that contains it. Repetitions within a request
            are learnt from that request while it runs. Default False.
        num_rounds: rounds of pruning. Default 3.

    Raises:
        ForedraftError: there is no token, or a token lies outside the vocabulary.
    """
    if order < 1:
        raise ForedraftError(f"the order of an n-gram model is at least 1, got {order}")
    orders = enumerate_ngrams(_read_sequences(ids, vocab_size), order, vocab_size, once_per_sequence)
    keep_masks = [grams.count >= (min_count if n else 0) for n, grams in enumerate(orders)]
    estimates = estimate(orders, keep_masks, vocab_size)
    total = sum(int(mask.sum()) for mask in keep_masks[1:])
    if max_entries is not None and total > max_entries:
        for rounds_left in range(num_rounds - 1, -1, -1):
            # The limit falls geometrically, since the losses change after other n-grams are pruned.
            limit = int(max_entries * (total / max(max_entries, 1)) ** (rounds_left / num_rounds))
            keep_masks = _prune(orders, keep_masks, estimates, limit)
            estimates = estimate(orders, keep_masks, vocab_size)
    return _build_model(orders, estimates, vocab_size)


def _read_sequences(
    ids: Sequence[int] | Ints | Sequence[Sequence[int] | Ints], vocab_size: int
) -> list[NDArray[np.int64]]:
    sequences = ids if len(ids) and np.ndim(ids[0]) else [ids]
    arrays = [np.asarray(row, dtype=np.int64) for row in sequences]
    if sum(map(len, arrays)) == 0:
        raise ForedraftError("an n-gram model needs at least one token to train on")
    low, high = min(int(a.min(initial=0)) for a in arrays), max(int(a.max(initial=0)) for a in arrays)
    if low < 0 or high >= vocab_size:
        raise ForedraftError(f"token ids lie in {low}..{high}, outside the vocabulary of {vocab_size}")
    return arrays


def enumerate_ngrams(
    sequences: Sequence[Ints], order: int, vocab_size: int, once_per_sequence: bool = False
) -> list[NgramSet]:
    """Enumerate the distinct n-grams of every order up to `order`.

    Args:
        sequences: token ids by sequence.
        order: maximum number of tokens of an n-gram.
        vocab_size: vocabulary size V.
        once_per_sequence: whether an n-gram counts once per sequence that contains it. Default False.

    Returns:
        Element n holds the (n + 1)-grams. Every token of the vocabulary is a 1-gram.
    """
    ids = np.concatenate(sequences)
    lengths = [len(s) for s in sequences]
    sequence_index = np.repeat(np.arange(len(lengths)), lengths)
    tokens_left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(ids))

    def count_occurrences(grams: Ints, sequence_indices: Ints, size: int) -> Ints:
        if once_per_sequence:
            grams = np.unique(grams * len(lengths) + sequence_indices) // len(lengths)
        return np.bincount(grams, minlength=size)

    zeros, vocabulary = np.zeros(vocab_size, dtype=np.int32), np.arange(vocab_size, dtype=np.int32)
    orders = [NgramSet(zeros, zeros, vocabulary, vocabulary, count_occurrences(ids, sequence_index, vocab_size))]
    gram_at = ids.astype(np.int32)  # [i]: index of the n-gram that starts at position i
    for n in range(2, order + 1):
        positions = np.flatnonzero(tokens_left >= n)
        keys = gram_at[positions].astype(np.int64) * vocab_size + ids[positions + n - 1]
        distinct, first_index, inverse = np.unique(keys, return_index=True, return_inverse=True)
        context = (distinct // vocab_size).astype(np.int32)
        suffix = gram_at[positions[first_index] + 1]
        token = (distinct % vocab_size).astype(np.int32)
        count = count_occurrences(inverse, sequence_index[positions], len(distinct))
        orders.append(NgramSet(context, suffix, orders[-1].first[context], token, count))
        gram_at[positions] = inverse
    return orders


def estimate(orders: Sequence[NgramSet], keep_masks: Sequence[Bools], vocab_size: int) -> list[OrderEstimate]:
    """Estimate shares, back-off weights and probabilities of every order.

    Args:
        orders: n-grams by order.
        keep_masks: [G] by order; False for a pruned n-gram.
        vocab_size: vocabulary size V.
    """
    result: list[OrderEstimate] = []
    for grams, counts, keep in zip(orders, adjust_counts(orders, keep_masks), keep_masks, strict=True):
        num_contexts = len(result[-1].q) if result else 1
        totals = np.bincount(grams.context, weights=counts, minlength=num_contexts)
        discounted = counts - compute_discounts(counts)[np.minimum(counts, MAX_DISCOUNT_COUNT)]
        share = np.where(keep & (discounted > 0), discounted / np.maximum(totals, 1)[grams.context], 0.0)
        backoff = 1.0 - np.bincount(grams.context, weights=share, minlength=num_contexts).astype(np.float64)
        below = result[-1].q[grams.suffix] if result else np.full(vocab_size, 1 / vocab_size)
        result.append(OrderEstimate(share, backoff, share + backoff[grams.context] * below))
    return result


def adjust_counts(orders: Sequence[NgramSet], keep_masks: Sequence[Bools]) -> list[Ints]:
    """Compute the counts [G] by order from which the probabilities are estimated.

    At the highest order they are occurrences. Below it an n-gram gets one from each longer n-gram with this suffix,
    and the whole count of each that is pruned. Without pruning these are the continuation counts of Kneser and Ney.

    Args:
        orders: n-grams by order.
        keep_masks: [G] by order; False for a pruned n-gram.
    """
    counts = [orders[-1].count]
    for n in range(len(orders) - 1, 0, -1):
        passed_on = np.where(keep_masks[n] & (counts[0] > 0), np.minimum(counts[0], 1), counts[0])
        below = np.bincount(orders[n].suffix, weights=passed_on, minlength=len(orders[n - 1].count))
        counts.insert(0, below.astype(np.int64))
    return counts


def compute_discounts(counts: Ints) -> Floats:
    """Compute the discounts [4] of counts 0, 1, 2, and 3 or more (Chen and Goodman, equation 26)."""
    n = np.bincount(np.minimum(counts, 5), minlength=6).astype(np.float64)
    if not n[1:5].all():  # the formula divides by these counts of counts
        return np.array(DEFAULT_DISCOUNTS)
    y = n[1] / (n[1] + 2 * n[2])
    discounts = [0.0, *(k - (k + 1) * y * n[k + 1] / n[k] for k in (1, 2, 3))]
    clipped: Floats = np.clip(np.array(discounts), 0.0, np.arange(4.0))
    return clipped


def _prune(
    orders: Sequence[NgramSet], keep_masks: Sequence[Bools], estimates: Sequence[OrderEstimate], max_entries: int
) -> list[Bools]:
    """Keep the at most `max_entries` n-grams of two or more tokens with the largest losses."""
    losses = [_compute_losses(orders, keep_masks, estimates, n) for n in range(1, len(orders))]
    candidates = np.concatenate([loss[keep] for loss, keep in zip(losses, keep_masks[1:], strict=True)])
    if len(candidates) <= max_entries:
        return list(keep_masks)
    threshold = np.partition(candidates, len(candidates) - max_entries - 1)[len(candidates) - max_entries - 1]
    return [keep_masks[0], *[keep & (loss > threshold) for loss, keep in zip(losses, keep_masks[1:], strict=True)]]


def _compute_losses(
    orders: Sequence[NgramSet], keep_masks: Sequence[Bools], estimates: Sequence[OrderEstimate], n: int
) -> Floats:
    """Compute the loss of likelihood [G] on the training text in nats if one n-gram alone is pruned.

    The share of the n-gram moves to the back-off weight. The n-gram loses probability, and the tokens without an
    n-gram of this context gain it.

    Reference: Stolcke, cs/0006025, adapted to interpolation.
    """
    grams, current, keep = orders[n], estimates[n], keep_masks[n]
    num_occurrences = orders[n - 1].count[grams.context]  # of the context
    below = estimates[n - 1].q[grams.suffix]
    backoff = current.backoff[grams.context]
    explicit = np.bincount(grams.context, weights=np.where(keep, current.q, 0), minlength=len(current.backoff))
    unlisted = (1 - explicit).clip(0)[grams.context]
    new_backoff = (backoff + current.share).clip(MIN_BACKOFF)
    loss = current.q * np.log(current.q / (new_backoff * below))
    gain = unlisted * np.log(new_backoff / backoff.clip(MIN_BACKOFF))
    return np.where(keep & (current.share > 0), num_occurrences * (loss - gain), -np.inf)


def _build_model(orders: Sequence[NgramSet], estimates: Sequence[OrderEstimate], vocab_size: int) -> NgramModel:
    """Build the table. A context is stored if it, or a longer context that ends with it, has entries."""
    highest = len(orders) - 1
    is_context = [np.zeros(len(grams.count), dtype=bool) for grams in orders]
    for n in range(highest, 0, -1):
        is_context[n - 1][orders[n].context[estimates[n].share > 0]] = True
        is_context[n - 1][orders[n].suffix[is_context[n]]] = True
    levels: list[NgramLevel] = []
    above = np.zeros(1, dtype=np.int64)  # index of each n-gram of the order below among the contexts of its level
    for n in range(highest):
        grams, share = orders[n], estimates[n + 1].share
        selected = np.flatnonzero(is_context[n])
        if not len(selected):
            break
        selected = selected[np.lexsort((grams.first[selected], above[grams.suffix[selected]]))]
        index = np.full(len(grams.count), -1, dtype=np.int64)
        index[selected] = np.arange(len(selected))
        entries = np.flatnonzero(share > 0)
        owner = index[orders[n + 1].context[entries]]
        by_owner = np.argsort(owner, kind="stable")
        entries = entries[by_owner]
        levels.append(
            NgramLevel(
                above[grams.suffix[selected]],
                grams.first[selected].astype(np.int64),
                np.bincount(owner, minlength=len(selected)),
                orders[n + 1].token[entries].astype(np.int64),
                share[entries],
            )
        )
        above = index
    return NgramModel(estimates[0].q, tuple(levels))
