"""Records of all scored rows of a step on the GPU: one program per row of logits, and one per row of q.

A record has what a single probability needs, so the walks read few numbers and store no row of probabilities.
"""

import triton
import triton.language as tl

from foredraft.kernels.gpu.keyed_noise import STEP_52, derive_token_key, estimate_exponentials, mix_token_states
from foredraft.kernels.gpu.row_filters import find_cuts
from foredraft.kernels.gpu.row_probs import (
    BEST,
    CUT,
    DEPTH,
    FACTOR,
    FLOOR,
    IS_GREEDY,
    LAST,
    LEAST,
    MIN_WEIGHT,
    ONE_HOT,
    POSITION,
    RECORD_WIDTH,
    REQUEST,
    REQUEST_WIDTH,
    ROW_WIDTH,
    SAMPLES,
    SCALE,
    STATE,
    TOP,
    TOP_K,
    TOP_P,
    TOTAL,
    UNIT,
    WALK,
    count_units,
    find_largest,
    load_weights,
)  # fmt: skip

# Share below the best estimate at which a score is computed in float64: far above the error of both estimates.
RACE_MARGIN = tl.constexpr(1.0 - 2.0**-13)


@triton.jit
def run_race(logits, key, top, factor, floor, cut, last, least, total, vocab_size, table, TILE: tl.constexpr):
    """Return the winner of the exponential race of a row.

    Scores are estimated in float32. Those near the best estimate are computed in float64, which are few tiles of the
    row: consumer GPUs compute float64 at a 64th of the speed.
    """
    estimates = tl.zeros([TILE], tl.float32)
    for at in range(0, vocab_size, TILE):
        ids = at + tl.arange(0, TILE)
        w = load_weights(logits, ids, ids < vocab_size, top, factor, floor, cut, last, least, table)
        scores = w / estimate_exponentials(mix_token_states(key, ids))
        estimates = tl.maximum(estimates, scores)
    bar = tl.max(estimates, 0) * RACE_MARGIN
    best = tl.full([], 0.0, tl.float64)
    winner = tl.full([], 0, tl.int32)
    for at in range(0, vocab_size, TILE):
        ids = at + tl.arange(0, TILE)
        w = load_weights(logits, ids, ids < vocab_size, top, factor, floor, cut, last, least, table)
        states = mix_token_states(key, ids)
        is_near = w / estimate_exponentials(states) >= bar
        if tl.max(is_near.to(tl.int32), 0) > 0:
            u = ((states >> 12).to(tl.float64) + 0.5) * STEP_52
            p = tl.div_rn(w, total + tl.zeros_like(w)).to(tl.float64)
            scores = tl.where(is_near, p / -tl.log(u), 0.0)
            tile_best = tl.max(scores, 0)
            first = tl.min(tl.where(scores == tile_best, ids, vocab_size), 0)
            winner = tl.where(tile_best > best, first, winner)
            best = tl.maximum(best, tile_best)
    return winner


@triton.jit(do_not_specialize=["num_rows"])
def describe_rows(
    logits, table, requests, request_floats, request_longs, request_doubles, rows, records, record_floats, totals,
    shortlists, logit_row, vocab_size, TILE: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Write the record of one row of logits. Grid (rows,)."""
    row = tl.program_id(0)
    numbers = rows + row * ROW_WIDTH
    request = tl.load(numbers + REQUEST)
    logits += row.to(tl.int64) * logit_row
    at = row * RECORD_WIDTH
    top, best = find_largest(logits, vocab_size, TILE)
    is_greedy = tl.load(requests + request * REQUEST_WIDTH + IS_GREEDY)
    tl.store(records + at + BEST, best)
    tl.store(records + at + ONE_HOT, is_greedy)
    if (best < 0) | (is_greedy > 0):
        return
    factor = tl.load(request_floats + request * REQUEST_WIDTH + SCALE)
    least = tl.load(request_floats + request * REQUEST_WIDTH + MIN_WEIGHT)
    top_k = tl.load(requests + request * REQUEST_WIDTH + TOP_K)
    top_p = tl.load(request_doubles + request * (REQUEST_WIDTH // 2) + TOP_P)
    floor = tl.full([], float("-inf"), tl.float32)
    cut = tl.full([], 0.0, tl.float32)
    last = vocab_size + tl.full([], 0, tl.int32)
    if (top_k > 0) | (top_p < 1.0):
        shortlist = shortlists + row * (2 * LIST)
        floor, cut, last = find_cuts(logits, shortlist, top, factor, top_k, top_p, vocab_size, table, TILE, LIST)
    units = tl.zeros([TILE], tl.int64)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        w = load_weights(logits, ids, ids < vocab_size, top, factor, floor, cut, last, least, table)
        units += count_units(w)
    total = (tl.sum(units, 0).to(tl.float64) * UNIT).to(tl.float32)
    if tl.load(requests + request * REQUEST_WIDTH + WALK) == SAMPLES:
        state = tl.load(request_longs + request * (REQUEST_WIDTH // 2) + STATE).to(tl.uint64)
        position = tl.load(requests + request * REQUEST_WIDTH + POSITION)
        key = derive_token_key(state, position + tl.load(numbers + DEPTH) + 1)
        winner = run_race(logits, key, top, factor, floor, cut, last, least, total, vocab_size, table, TILE)
        tl.store(records + at + BEST, winner)
    else:
        mass = tl.zeros([TILE], tl.float64)
        for first in range(0, vocab_size, TILE):
            ids = first + tl.arange(0, TILE)
            w = load_weights(logits, ids, ids < vocab_size, top, factor, floor, cut, last, least, table)
            mass += tl.div_rn(w, total + tl.zeros_like(w)).to(tl.float64)
        tl.store(records + at + LAST, last)
        tl.store(record_floats + at + TOP, top)
        tl.store(record_floats + at + FACTOR, factor)
        tl.store(record_floats + at + FLOOR, floor)
        tl.store(record_floats + at + CUT, cut)
        tl.store(record_floats + at + LEAST, least)
        tl.store(record_floats + at + TOTAL, total)
        tl.store(totals + row, tl.sum(mass, 0))


@triton.jit
def describe_drafts(q, draft_kinds, draft_sums, draft_row, vocab_size, TILE: tl.constexpr):
    """Write the kind and the sum of one row of q. Grid (rows,).

    Kind 0 is a row of zeros, 1 a distribution, 2 a row that is none.
    """
    row = tl.program_id(0)
    q += row.to(tl.int64) * draft_row
    sums = tl.zeros([TILE], tl.float64)
    lowest = tl.zeros([TILE], tl.float64)
    has_mass = tl.zeros([TILE], tl.int32)
    for at in range(0, vocab_size, TILE):
        ids = at + tl.arange(0, TILE)
        mass = tl.load(q + ids, mask=ids < vocab_size, other=0.0).to(tl.float64)
        sums += mass
        lowest = tl.minimum(lowest, mass)
        has_mass |= (mass != 0).to(tl.int32)
    total = tl.sum(sums, 0)
    is_valid = (total > 0) & (total < float("inf")) & (tl.min(lowest, 0) >= 0)
    tl.store(draft_kinds + row, tl.where(tl.max(has_mass, 0) == 0, 0, tl.where(is_valid, 1, 2)))
    tl.store(draft_sums + row, total)
