"""The walk of a joint test over the draft chain of a request on the GPU, one program per request.

The letters are those of `verification/block_chain.py`: weights w_i and residual masses m_i. Weights need single
probabilities; a mass reads a row, and only where the uniform is below the weight.
"""

import triton
import triton.language as tl

from foredraft.kernels import tree_walk
from foredraft.kernels.gpu.keyed_noise import compute_accept_uniform, compute_sample_uniform
from foredraft.kernels.gpu.row_probs import (
    FIRST_ROW,
    NUM_ROWS,
    NUM_SAMPLED,
    POSITION,
    REQUEST_WIDTH,
    ROW_WIDTH,
    STATE,
    TOKEN,
    WALK,
    is_row_valid,
    load_probs,
)  # fmt: skip
from foredraft.kernels.gpu.tree_walks import load_draft, sample_residual, write_pair

CHAIN = tl.constexpr(int(tree_walk.TreeWalk.CHAIN))


@triton.jit
def load_next_draft(drafts, rows, row, ids, inside, HAS_Q: tl.constexpr):
    """Return the distribution [N] of the draft token after a row; 0 if the row of q is none."""
    q, draft_row, draft_kinds, draft_sums = drafts
    kind = tl.full([], 0, tl.int32)
    total = tl.full([], 1.0, tl.float64)
    if HAS_Q:
        kind = tl.where(tl.load(rows + row * ROW_WIDTH + NUM_SAMPLED) > 0, tl.load(draft_kinds + row), 0)
        total = tl.where(kind == 1, tl.load(draft_sums + row), 1.0)
    draft = tl.load(rows + (row + 1) * ROW_WIDTH + TOKEN)
    own = q + row.to(tl.int64) * draft_row
    d = load_draft(own, draft_sums, draft, kind > 0, False, total, ids, inside, HAS_Q)
    return tl.where(kind < 2, d, 0.0)


@triton.jit
def load_excess(target, drafts, rows, row, weight, ids, inside, HAS_Q: tl.constexpr):
    """Return max(0, w * p - q) of token ids [N] after a row."""
    p = load_probs(target, row, ids, inside)
    d = load_next_draft(drafts, rows, row, ids, inside, HAS_Q)
    return tl.where(inside, tl.maximum(p * weight - d, 0.0), 0.0)


@triton.jit
def measure_excess(target, drafts, rows, row, weight, vocab_size, HAS_Q: tl.constexpr, TILE: tl.constexpr):
    """Return the residual mass after a row."""
    mass = tl.zeros([TILE], tl.float64)
    for at in range(0, vocab_size, TILE):
        ids = at + tl.arange(0, TILE)
        mass += load_excess(target, drafts, rows, row, weight, ids, ids < vocab_size, HAS_Q)
    return tl.sum(mass, 0)


@triton.jit
def count_drafts(drafts, rows, first_row, num_rows, vocab_size, HAS_Q: tl.constexpr):
    """Count the draft tokens before the first that no correct drafter proposes."""
    count = tl.full([], 0, tl.int32)
    is_open = num_rows > 1
    while is_open:
        draft = tl.load(rows + (first_row + count + 1) * ROW_WIDTH + TOKEN)
        inside = draft < vocab_size
        d = load_next_draft(drafts, rows, first_row + count, draft, inside, HAS_Q)
        is_valid = inside & (d > 0)
        count += is_valid.to(tl.int32)
        is_open = is_valid & (count < num_rows - 1)
    return count


@triton.jit
def compute_chain_weights(target, drafts, rows, weights, first_row, num_drafts, HAS_Q: tl.constexpr):
    """Store w_0 and the weights of draft tokens up to the first row with invalid logits; returns their number."""
    weight = tl.full([], 1.0, tl.float64)
    count = tl.full([], 0, tl.int32)
    tl.store(weights, weight)
    is_open = (num_drafts > 0) & is_row_valid(target, first_row)
    while is_open:
        row = first_row + count
        draft = tl.load(rows + (row + 1) * ROW_WIDTH + TOKEN)
        p = load_probs(target, row, draft, draft >= 0)
        weight = tl.minimum(weight * p / load_next_draft(drafts, rows, row, draft, draft >= 0, HAS_Q), 1.0)
        count += 1
        tl.store(weights + count, weight)
        is_open = (count < num_drafts) & is_row_valid(target, first_row + count)
    tl.debug_barrier()  # other threads of the program read the weights
    return count


@triton.jit
def count_accepted(
    target, drafts, rows, weights, state, position, first_row, num_drafts, num_weights, vocab_size,
    HAS_Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the length of the longest prefix that passes its test."""
    accepted = num_weights
    is_open = accepted > 0
    while is_open:
        row = first_row + accepted
        u = compute_accept_uniform(state, position, accepted)
        weight = tl.load(weights + accepted)
        passes = u < weight
        # without valid logits no token can be chosen after it, so it counts as the last draft token
        if passes & (accepted < num_drafts) & is_row_valid(target, row):
            mass = measure_excess(target, drafts, rows, row, weight, vocab_size, HAS_Q, TILE)
            rest = mass + 1.0 - weight
            passes = (u * rest < mass) | (rest <= 0)
        accepted = tl.where(passes, accepted, accepted - 1)
        is_open = (accepted > 0) & (passes == 0)
    return accepted


@triton.jit
def sample_ending(
    target, drafts, rows, weights, residual, state, position, first_row, num_drafts, accepted, vocab_size,
    HAS_Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sample the token after the accepted ones, from the residual if a draft token follows them."""
    row = first_row + accepted
    mass = tl.full([], 0.0, tl.float64)
    if accepted < num_drafts:
        weight = tl.load(weights + accepted)
        mass = measure_excess(target, drafts, rows, row, weight, vocab_size, HAS_Q, TILE)
        if mass > 0:  # else p, as for all residuals that rounding leaves empty
            for at in range(0, vocab_size, TILE):
                ids = at + tl.arange(0, TILE)
                inside = ids < vocab_size
                excess = load_excess(target, drafts, rows, row, weight, ids, inside, HAS_Q)
                tl.store(residual + ids, excess / mass, mask=inside)
            tl.debug_barrier()
    u = compute_sample_uniform(state, position, accepted)
    return sample_residual(target, residual, row, mass > 0, u, vocab_size, TILE)


@triton.jit(do_not_specialize=["first_request", "out_row", "most_rows"])
def walk_chain(
    logits, q, table, requests, request_longs, rows, records, record_floats, totals, draft_kinds, draft_sums, scratch,
    weights, out, first_request, out_row, most_rows, logit_row, draft_row, vocab_size, HAS_Q: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Accept the longest prefix that passes, then sample the rest. Grid (requests,), each with its scratch."""
    place = tl.program_id(0)
    request = first_request + place
    numbers = requests + request * REQUEST_WIDTH
    num_rows = tl.load(numbers + NUM_ROWS)
    if (tl.load(numbers + WALK) != CHAIN) | (num_rows == 0):
        return
    target = (logits, logit_row, records, record_floats, totals, table)
    drafts = (q, draft_row, draft_kinds, draft_sums)
    out += request * out_row
    weights += request * most_rows
    first_row, position = tl.load(numbers + FIRST_ROW), tl.load(numbers + POSITION)
    state = tl.load(request_longs + request * (REQUEST_WIDTH // 2) + STATE).to(tl.uint64)
    residual = scratch + place.to(tl.int64) * 2 * vocab_size
    num_drafts = count_drafts(drafts, rows, first_row, num_rows, vocab_size, HAS_Q)
    num_weights = compute_chain_weights(target, drafts, rows, weights, first_row, num_drafts, HAS_Q)
    accepted = count_accepted(
        target, drafts, rows, weights, state, position, first_row, num_drafts, num_weights, vocab_size, HAS_Q, TILE
    )  # fmt: skip
    for node in range(accepted):
        write_pair(out, node, node, tl.load(rows + (first_row + node + 1) * ROW_WIDTH + TOKEN))
    length = accepted
    if is_row_valid(target, first_row + accepted):
        token = sample_ending(
            target, drafts, rows, weights, residual, state, position, first_row, num_drafts, accepted, vocab_size,
            HAS_Q, TILE,
        )  # fmt: skip
        write_pair(out, accepted, accepted, token)
        length += 1
    tl.store(out, length)
