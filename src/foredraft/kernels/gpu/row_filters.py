"""Cuts of top-k and top-p in rows of logits on the GPU, by bisection over a list of heavy tokens, without sorting."""

import triton
import triton.language as tl

from foredraft.kernels.gpu.row_probs import LOW_31, ONE_BITS, compute_weights, convert_to_order, count_units

LOWEST_KEY = tl.constexpr(-0x7F800001)  # order key of -inf
# Exponent above which tokens are listed before a search: 2^-16 of the likeliest, as in `sampling/filters.py`.
LIST_EXPONENT = tl.constexpr(-16.0)


@triton.jit
def load_listed(logits, shortlist, at, count, is_listed, TILE: tl.constexpr):
    """Load the next tokens of a list, or of the row: ids [TILE], whether they exist, and their logits."""
    place = at + tl.arange(0, TILE)
    inside = place < count
    ids = place
    if is_listed:
        ids = tl.load(shortlist + place, mask=inside, other=0)
    x = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    return ids, inside, x


@triton.jit
def find_floor(logits, shortlist, count, is_listed, top, top_k, TILE: tl.constexpr):
    """Find the k-th largest logit, by bisection. Both ends move to logits of the row, so steps follow their number."""
    low = tl.full([], 0, tl.int64) + LOWEST_KEY
    high = convert_to_order(top).to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        found = tl.zeros([TILE], tl.int32)
        least = tl.zeros([TILE], tl.int64) + high  # of the logits from the middle on
        most = tl.zeros([TILE], tl.int64) + low  # of those below
        for at in range(0, count, TILE):
            _, inside, x = load_listed(logits, shortlist, at, count, is_listed, TILE)
            order = convert_to_order(x).to(tl.int64)
            is_large = inside & (order >= middle)
            found += is_large.to(tl.int32)
            least = tl.minimum(least, tl.where(is_large, order, high))
            most = tl.maximum(most, tl.where(is_large, low, order))
        if tl.sum(found, 0) >= top_k:
            low = tl.min(least, 0)
        else:
            high = tl.max(most, 0)
    key = low.to(tl.int32)
    return (key ^ ((key >> 31) & LOW_31)).to(tl.float32, bitcast=True)


@triton.jit
def load_listed_weights(
    logits, shortlist, at, count, is_listed, top, factor, floor, table, TILE: tl.constexpr, LIST: tl.constexpr
):  # fmt: skip
    """Load ids [TILE], whether they exist and are above the floor, and their weights; 0 for the others."""
    ids, inside, x = load_listed(logits, shortlist, at, count, is_listed, TILE)
    is_above = inside & (x >= floor)
    if is_listed:  # the weights lie behind the ids
        bits = tl.load(shortlist + LIST + at + tl.arange(0, TILE), mask=inside, other=0)
        w = bits.to(tl.float32, bitcast=True)
    else:
        w = compute_weights((x - top) * factor, table)
    return ids, is_above, tl.where(is_above, w, 0.0)


@triton.jit
def find_nucleus(
    logits, shortlist, count, is_listed, top, factor, floor, limit, vocab_size, table, TILE: tl.constexpr,
    LIST: tl.constexpr,
):  # fmt: skip
    """Find the least weight of a nucleus of `limit` units, and the last id that has this weight and belongs to it."""
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0, tl.int32) + ONE_BITS
    while low < high:
        middle = low + (high - low + 1) // 2
        reached = tl.zeros([TILE], tl.int64)
        least = tl.zeros([TILE], tl.int32) + high  # of the weights from the middle on
        most = tl.zeros([TILE], tl.int32) + low  # of those below
        for at in range(0, count, TILE):
            _, _, w = load_listed_weights(
                logits, shortlist, at, count, is_listed, top, factor, floor, table, TILE, LIST
            )  # fmt: skip
            bits = w.to(tl.int32, bitcast=True)
            is_heavy = bits >= middle
            reached += tl.where(is_heavy, count_units(w), 0)
            least = tl.minimum(least, tl.where(is_heavy, bits, high))
            most = tl.maximum(most, tl.where(is_heavy, low, bits))
        if tl.sum(reached, 0) >= limit:
            low = tl.min(least, 0)
        else:
            high = tl.max(most, 0)
    cut = low.to(tl.float32, bitcast=True)
    above = tl.zeros([TILE], tl.int64)
    for at in range(0, count, TILE):
        _, _, w = load_listed_weights(
            logits, shortlist, at, count, is_listed, top, factor, floor, table, TILE, LIST
        )  # fmt: skip
        above += tl.where(w > cut, count_units(w), 0)
    unit = tl.maximum(count_units(cut), 1)
    # tokens with the weight of the cut that are kept, lower ids first
    num_equal = (limit - tl.sum(above, 0) + unit - 1) // unit
    last = vocab_size + tl.zeros([TILE], tl.int32)
    seen = tl.full([], 0, tl.int32)
    for at in range(0, count, TILE):
        ids, is_above, w = load_listed_weights(
            logits, shortlist, at, count, is_listed, top, factor, floor, table, TILE, LIST
        )  # fmt: skip
        is_equal = (is_above & (w == cut)).to(tl.int32)
        order = seen + tl.cumsum(is_equal, 0)
        is_last = (is_equal > 0) & (order.to(tl.int64) == num_equal)
        last = tl.minimum(last, tl.where(is_last, ids, vocab_size))
        seen += tl.sum(is_equal, 0)
    return cut, tl.min(last, 0)


@triton.jit
def list_heavy(logits, shortlist, top, factor, vocab_size, table, TILE: tl.constexpr, LIST: tl.constexpr):
    """List the ids of tokens above `LIST_EXPONENT`; returns their number and units, and the units of all tokens."""
    count = tl.full([], 0, tl.int32)
    listed = tl.zeros([TILE], tl.int64)
    total = tl.zeros([TILE], tl.int64)
    for at in range(0, vocab_size, TILE):
        ids = at + tl.arange(0, TILE)
        inside = ids < vocab_size
        x = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
        exponents = (x - top) * factor
        w = compute_weights(exponents, table)
        units = tl.where(inside, count_units(w), 0)
        is_heavy = inside & (exponents >= LIST_EXPONENT)
        place = count + tl.cumsum(is_heavy.to(tl.int32), 0) - 1
        is_kept = is_heavy & (place < LIST)
        tl.store(shortlist + place, ids, mask=is_kept)
        tl.store(shortlist + LIST + place, w.to(tl.int32, bitcast=True), mask=is_kept)
        count += tl.sum(is_heavy.to(tl.int32), 0)
        listed += tl.where(is_heavy, units, 0)
        total += units
    tl.debug_barrier()  # other threads of the program read the list
    return count, tl.sum(listed, 0), tl.sum(total, 0)


@triton.jit
def find_cuts(
    logits, shortlist, top, factor, top_k, top_p, vocab_size, table, TILE: tl.constexpr, LIST: tl.constexpr
):  # fmt: skip
    """Find the cuts of top-k and top-p: least logit, least weight, last id with this weight.

    The searches read a list of the heavy tokens if these contain what the filters keep, otherwise the whole row.
    """
    num_heavy, listed, total = list_heavy(logits, shortlist, top, factor, vocab_size, table, TILE, LIST)
    is_listed = num_heavy <= LIST
    if top_k > 0:
        is_listed = is_listed & (num_heavy >= top_k)
    else:
        is_listed = is_listed & (listed >= tl.ceil(top_p * total.to(tl.float64)).to(tl.int64))
    count = tl.where(is_listed, num_heavy, vocab_size)
    floor = tl.full([], float("-inf"), tl.float32)
    if top_k > 0:
        floor = find_floor(logits, shortlist, count, is_listed, top, top_k, TILE)
        units = tl.zeros([TILE], tl.int64)
        for at in range(0, count, TILE):
            _, _, w = load_listed_weights(
                logits, shortlist, at, count, is_listed, top, factor, floor, table, TILE, LIST
            )  # fmt: skip
            units += count_units(w)
        total = tl.sum(units, 0)
    cut = tl.full([], 0.0, tl.float32)
    last = vocab_size + tl.full([], 0, tl.int32)
    if top_p < 1.0:
        limit = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        cut, last = find_nucleus(
            logits, shortlist, count, is_listed, top, factor, floor, limit, vocab_size, table, TILE, LIST
        )  # fmt: skip
    return floor, cut, last
