"""Walks down the token trees of a step on the GPU, one program per request.

A walk reads the records of `row_records.py` at the nodes that it visits. Only a rejection reads rows of p and q, in
float64. The output of a request is a list of pairs: a node counted from the root, and the token after it. Their number
stands in front; 0 = the logits at the root are invalid.
"""

import triton
import triton.language as tl

from foredraft.kernels import tree_walk
from foredraft.kernels.gpu.keyed_noise import compute_accept_uniform, compute_sample_uniform
from foredraft.kernels.gpu.row_probs import (
    BEST,
    FIRST_CHILD,
    FIRST_ROW,
    NEXT_SIBLING,
    NUM_ROWS,
    NUM_SAMPLED,
    POSITION,
    RECORD_WIDTH,
    REQUEST_WIDTH,
    ROW_WIDTH,
    SAMPLES,
    STATE,
    TOKEN,
    WALK,
    is_row_valid,
    load_probs,
)  # fmt: skip

TRIALS = tl.constexpr(int(tree_walk.TreeWalk.TRIALS))


@triton.jit
def write_pair(out, length, node, token):
    """Write pair number `length` of a request."""
    tl.store(out + 1 + 2 * length, node)
    tl.store(out + 2 + 2 * length, token)


@triton.jit(do_not_specialize=["out_row"])
def walk_samples(requests, rows, records, out, out_row):
    """Walk to the child that equals the sample, from the root on. Grid (requests,)."""
    request = tl.program_id(0)
    numbers = requests + request * REQUEST_WIDTH
    if tl.load(numbers + WALK) != SAMPLES:
        return
    out += request * out_row
    first_row = tl.load(numbers + FIRST_ROW)
    node = tl.where(tl.load(numbers + NUM_ROWS) > 0, 0, -1)
    length = tl.full([], 0, tl.int32)
    while node >= 0:
        token = tl.load(records + (first_row + node) * RECORD_WIDTH + BEST)
        child = tl.full([], -1, tl.int32)
        if token >= 0:
            write_pair(out, length, node, token)
            length += 1
            child = tl.load(rows + (first_row + node) * ROW_WIDTH + FIRST_CHILD)
        is_other = child >= 0
        while is_other:
            at = rows + (first_row + child) * ROW_WIDTH
            is_other = tl.load(at + TOKEN) != token
            child = tl.where(is_other, tl.load(at + NEXT_SIBLING), child)
            is_other = is_other & (child >= 0)
        node = child
    tl.store(out, length)


@triton.jit
def load_residual(target, residual, row, is_stored, ids, inside):
    """Return r of token ids [N]: p of the row, or the stored residual."""
    if is_stored:  # noqa: SIM108 # the other branch must not run
        r = tl.load(residual + ids, mask=inside, other=0.0)
    else:
        r = load_probs(target, row, ids, inside)
    return r


@triton.jit
def load_draft(q, remaining, draft, is_sampled, is_stored, total, ids, inside, HAS_Q: tl.constexpr):
    """Return the distribution [N] of a draft token: one-hot, or a row of q without earlier siblings, normalised."""
    d = (ids == draft).to(tl.float64)
    if HAS_Q:  # noqa: SIM102 # a constant: without it `q` is not read
        if is_sampled:
            if is_stored:
                mass = tl.load(remaining + ids, mask=inside, other=0.0)
            else:
                mass = tl.load(q + ids, mask=inside, other=0.0).to(tl.float64)
            d = mass / total
    return d


@triton.jit
def sample_residual(target, residual, row, is_stored, u, vocab_size, TILE: tl.constexpr):
    """Return the first token whose cumulative mass exceeds u times the sum of r; never a token without mass."""
    sums = tl.zeros([TILE], tl.float64)
    for at in range(0, vocab_size, TILE):
        ids = at + tl.arange(0, TILE)
        sums += load_residual(target, residual, row, is_stored, ids, ids < vocab_size)
    bound = u * tl.sum(sums, 0)
    before = tl.full([], 0.0, tl.float64)
    token = tl.full([], -1, tl.int32)
    latest = tl.full([], 0, tl.int32)  # last token with mass so far, if rounding leaves none above the bound
    at = tl.full([], 0, tl.int32)
    while (token < 0) & (at < vocab_size):
        ids = at + tl.arange(0, TILE)
        r = load_residual(target, residual, row, is_stored, ids, ids < vocab_size)
        mass = tl.sum(r, 0)
        latest = tl.maximum(latest, tl.max(tl.where(r > 0, ids, 0), 0))
        if before + mass > bound:
            is_above = (r > 0) & (before + tl.cumsum(r, 0) > bound)
            first = tl.min(tl.where(is_above, ids, vocab_size), 0)
            token = tl.where(first < vocab_size, first, latest)
        before += mass
        at += TILE
    return tl.where(token < 0, latest, token)


@triton.jit
def reject_draft(
    target, residual, row, is_stored, q, remaining, draft, is_sampled, total, vocab_size, HAS_Q: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store the residual after a rejected draft token, and q without it; returns the sum of this q.

    Without any mass in the residual, which only rounding can cause, r stays as it is.
    """
    rests = tl.zeros([TILE], tl.float64)
    for at in range(0, vocab_size, TILE):
        ids = at + tl.arange(0, TILE)
        r = load_residual(target, residual, row, is_stored, ids, ids < vocab_size)
        d = load_draft(q, remaining, draft, is_sampled, is_stored, total, ids, ids < vocab_size, HAS_Q)
        rests += tl.maximum(r - d, 0.0)
    rest = tl.sum(rests, 0)
    left = tl.zeros([TILE], tl.float64)
    tl.debug_barrier()  # before a thread writes what others read
    for at in range(0, vocab_size, TILE):
        ids = at + tl.arange(0, TILE)
        inside = ids < vocab_size
        r = load_residual(target, residual, row, is_stored, ids, inside)
        d = load_draft(q, remaining, draft, is_sampled, is_stored, total, ids, inside, HAS_Q)
        changed = tl.where(rest > 0, tl.maximum(r - d, 0.0) / tl.where(rest > 0, rest, 1.0), r)
        tl.store(residual + ids, changed, mask=inside)
        if is_sampled:
            others = tl.where(ids == draft, 0.0, d)
            tl.store(remaining + ids, others, mask=inside)
            left += others
    tl.debug_barrier()
    return tl.sum(left, 0)


@triton.jit
def try_children(
    target, drafts, rows, residual, remaining, state, position, first_row, node, vocab_size, HAS_Q: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Try the children of a node in order; returns the accepted one and its token, or -1 and a sample of the rest.

    `drafts` is (q, distance of rows, kinds of rows, sums of rows).
    """
    row = first_row + node
    q = drafts[0] + row.to(tl.int64) * drafts[1]
    child = tl.load(rows + row * ROW_WIDTH + FIRST_CHILD)
    kind = tl.full([], 0, tl.int32)
    total = tl.full([], 1.0, tl.float64)
    if HAS_Q:
        kind = tl.load(drafts[2] + row)
        total = tl.load(drafts[3] + row)
    num_sampled = tl.where(kind > 0, tl.load(rows + row * ROW_WIDTH + NUM_SAMPLED), 0)
    accepted = tl.full([], -1, tl.int32)
    token = tl.full([], -1, tl.int32)
    num_rejected = tl.full([], 0, tl.int32)
    while child >= 0:
        at = rows + (first_row + child) * ROW_WIDTH
        draft = tl.load(at + TOKEN)
        is_sampled = num_rejected < num_sampled
        is_stored = num_rejected > 0
        inside = draft < vocab_size
        has_q = inside & ((num_rejected >= num_sampled) | ((kind == 1) & (total > 0)))
        d = load_draft(q, remaining, draft, is_sampled, is_stored, total, draft, has_q, HAS_Q)
        following = tl.full([], -1, tl.int32)
        if has_q & (d > 0):  # else this child and those after it count as not drafted
            r = load_residual(target, residual, row, is_stored, draft, inside)
            if compute_accept_uniform(state, position, child) * d < r:
                accepted = child
                token = draft
            else:
                total = reject_draft(
                    target, residual, row, is_stored, q, remaining, draft, is_sampled, total, vocab_size, HAS_Q, TILE
                )  # fmt: skip
                num_rejected += 1
                following = tl.load(at + NEXT_SIBLING)
        child = following
    if accepted < 0:
        u = compute_sample_uniform(state, position, node)
        token = sample_residual(target, residual, row, num_rejected > 0, u, vocab_size, TILE)
    return accepted, token


@triton.jit(do_not_specialize=["first_request", "out_row"])
def walk_trials(
    logits, q, table, requests, request_longs, rows, records, record_floats, totals, draft_kinds, draft_sums, scratch,
    out, first_request, out_row, logit_row, draft_row, vocab_size, HAS_Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Walk down while a trial accepts a child, then sample the rest. Grid (requests,), each with its scratch."""
    place = tl.program_id(0)
    request = first_request + place
    numbers = requests + request * REQUEST_WIDTH
    if tl.load(numbers + WALK) != TRIALS:
        return
    target = (logits, logit_row, records, record_floats, totals, table)
    drafts = (q, draft_row, draft_kinds, draft_sums)
    out += request * out_row
    first_row, position = tl.load(numbers + FIRST_ROW), tl.load(numbers + POSITION)
    state = tl.load(request_longs + request * (REQUEST_WIDTH // 2) + STATE).to(tl.uint64)
    residual = scratch + place.to(tl.int64) * 2 * vocab_size
    node = tl.where(tl.load(numbers + NUM_ROWS) > 0, 0, -1)
    length = tl.full([], 0, tl.int32)
    while node >= 0:
        child = tl.full([], -1, tl.int32)
        if is_row_valid(target, first_row + node):
            child, token = try_children(
                target, drafts, rows, residual, residual + vocab_size, state, position, first_row, node, vocab_size,
                HAS_Q, TILE,
            )  # fmt: skip
            write_pair(out, length, node, token)
            length += 1
        node = child
    tl.store(out, length)
