"""The walk of a joint test over the draft chain of a request on the GPU, one program per request.

The letters are those of `verification/block_chain.py`: weights w_i and residual masses m_i. Weights need single
probabilities; a mass reads a row, and only where the uniform is below the weight.
"""

import triton
import triton.language as tl

from foredraft.kernels.gpu.keyed_noise import compute_accept_uniform, compute_sample_uniform
from foredraft.kernels.gpu.row_probs import (
    BEST, FIRST_ROW, NUM_ROWS, NUM_SAMPLED, POSITION, RECORD_WIDTH, REQUEST_WIDTH, ROW_WIDTH, STATE, TOKEN, WALK,
    load_probs,
)  # fmt: skip
from foredraft.kernels.gpu.tree_walks import CHAIN, load_draft, sample_residual, write_pair


@triton.jit
def load_next_draft(q, draft_kinds, draft_sums, rows, row, draft_row, ids, inside, HAS_Q: tl.constexpr):
    """Return the distribution [N] of the draft token after a row; 0 if the row of q is none."""
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
def count_drafts(q, draft_kinds, draft_sums, rows, first_row, num_rows, draft_row, vocab_size, HAS_Q: tl.constexpr):
    """Count the draft tokens before the first that no correct drafter proposes."""
    count = tl.full([], 0, tl.int32)
    is_open = num_rows > 1
    while is_open:
        draft = tl.load(rows + (first_row + count + 1) * ROW_WIDTH + TOKEN)
        inside = draft < vocab_size
        d = load_next_draft(q, draft_kinds, draft_sums, rows, first_row + count, draft_row, draft, inside, HAS_Q)
        is_valid = inside & (d > 0)
        count += is_valid.to(tl.int32)
        is_open = is_valid & (count < num_rows - 1)
    return count


@triton.jit
def load_excess(
    logits, records, record_floats, totals, table, q, draft_kinds, draft_sums, rows, row, logit_row, draft_row, weight, ids, inside,
    HAS_Q: tl.constexpr,
):  # fmt: skip
    """Return max(0, w * p - q) of token ids [N] after a row."""
    own = logits + row.to(tl.int64) * logit_row
    p = load_probs(own, records, record_floats, totals, table, row, ids, inside)
    d = load_next_draft(q, draft_kinds, draft_sums, rows, row, draft_row, ids, inside, HAS_Q)
    return tl.where(inside, tl.maximum(p * weight - d, 0.0), 0.0)


@triton.jit
def measure_excess(
    logits, records, record_floats, totals, table, q, draft_kinds, draft_sums, rows, row, logit_row, draft_row, weight, vocab_size,
    HAS_Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return the residual mass after a row."""
    mass = tl.zeros([TILE], tl.float64)
    for at in range(0, vocab_size, TILE):
        ids = at + tl.arange(0, TILE)
        excess = load_excess(
            logits, records, record_floats, totals, table, q, draft_kinds, draft_sums, rows, row, logit_row, draft_row, weight, ids,
            ids < vocab_size, HAS_Q,
        )  # fmt: skip
        mass += excess
    return tl.sum(mass, 0)


@triton.jit(do_not_specialize=["first_request", "out_row", "most_rows"])
def walk_chain(
    logits, q, table, requests, request_longs, rows, records, record_floats, totals, draft_kinds, draft_sums, scratch, weights, out,
    first_request, out_row, most_rows, logit_row, draft_row, vocab_size, HAS_Q: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Accept the longest prefix that passes, then sample the rest. Grid (requests,), each with its scratch."""
    place = tl.program_id(0)
    request = first_request + place
    numbers = requests + request * REQUEST_WIDTH
    num_rows = tl.load(numbers + NUM_ROWS)
    out += request * out_row
    if tl.load(numbers + WALK) != CHAIN:
        return
    first_row, position = tl.load(numbers + FIRST_ROW), tl.load(numbers + POSITION)
    if num_rows == 0:
        tl.store(out, 0)
        return
    state = tl.load(request_longs + request * (REQUEST_WIDTH // 2) + STATE).to(tl.uint64)
    residual = scratch + place.to(tl.int64) * 2 * vocab_size
    weights += request * most_rows
    num_drafts = count_drafts(q, draft_kinds, draft_sums, rows, first_row, num_rows, draft_row, vocab_size, HAS_Q)
    weight = tl.full([], 1.0, tl.float64)
    num_weights = tl.full([], 0, tl.int32)
    is_open = (num_drafts > 0) & (tl.load(records + first_row * RECORD_WIDTH + BEST) >= 0)
    tl.store(weights, weight)
    while is_open:
        row = first_row + num_weights
        draft = tl.load(rows + (row + 1) * ROW_WIDTH + TOKEN)
        own = logits + row.to(tl.int64) * logit_row
        p = load_probs(own, records, record_floats, totals, table, row, draft, draft < vocab_size)
        d = load_next_draft(q, draft_kinds, draft_sums, rows, row, draft_row, draft, draft < vocab_size, HAS_Q)
        weight = tl.minimum(weight * p / d, 1.0)
        num_weights += 1
        tl.store(weights + num_weights, weight)
        is_open = (num_weights < num_drafts) & (tl.load(records + (row + 1) * RECORD_WIDTH + BEST) >= 0)
    tl.debug_barrier()
    accepted = num_weights
    is_open = accepted > 0
    while is_open:
        u = compute_accept_uniform(state, position, accepted)
        weight = tl.load(weights + accepted)
        passes = u < weight
        row = first_row + accepted
        is_valid = tl.load(records + row * RECORD_WIDTH + BEST) >= 0
        if passes & is_valid & (accepted < num_drafts):
            mass = measure_excess(
                logits, records, record_floats, totals, table, q, draft_kinds, draft_sums, rows, row, logit_row, draft_row, weight,
                vocab_size, HAS_Q, TILE,
            )  # fmt: skip
            passes = (u * (mass + 1.0 - weight) < mass) | (mass + 1.0 - weight <= 0)
        accepted = tl.where(passes, accepted, accepted - 1)
        is_open = (not passes) & (accepted > 0)
    for node in range(0, accepted):
        write_pair(out, node, node, tl.load(rows + (first_row + node + 1) * ROW_WIDTH + TOKEN))
    row = first_row + accepted
    length = accepted
    if tl.load(records + row * RECORD_WIDTH + BEST) >= 0:
        mass = tl.full([], 0.0, tl.float64)
        if accepted < num_drafts:
            weight = tl.load(weights + accepted)
            mass = measure_excess(
                logits, records, record_floats, totals, table, q, draft_kinds, draft_sums, rows, row, logit_row, draft_row, weight,
                vocab_size, HAS_Q, TILE,
            )  # fmt: skip
            if mass > 0:
                for at in range(0, vocab_size, TILE):
                    ids = at + tl.arange(0, TILE)
                    excess = load_excess(
                        logits, records, record_floats, totals, table, q, draft_kinds, draft_sums, rows, row, logit_row, draft_row,
                        weight, ids, ids < vocab_size, HAS_Q,
                    )  # fmt: skip
                    tl.store(residual + ids, excess / mass, mask=ids < vocab_size)
                tl.debug_barrier()
        u = compute_sample_uniform(state, position, accepted)
        token = sample_residual(
            logits + row.to(tl.int64) * logit_row, records, record_floats, totals, table, residual, row, mass > 0, u,
            vocab_size, TILE,
        )  # fmt: skip
        write_pair(out, accepted, accepted, token)
        length += 1
    tl.store(out, length)
