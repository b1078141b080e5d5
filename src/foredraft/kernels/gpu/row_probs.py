"""Probabilities of rows of logits on the GPU: the weights, filters and sums of `sampling/`, with their bits.

float32 weights are made of single products and sums, and are summed in integer units. So the filtered sets and the
float32 probabilities have the bits of the CPU, whatever the order of a sum. A record per row has what a single
probability needs: the largest logit, the cuts of the filters and the sum. No row of probabilities is stored.
"""

import triton
import triton.language as tl

from foredraft.kernels import tree_walk
from foredraft.kernels.gpu import verify_block

REQUEST_WIDTH = tl.constexpr(verify_block.REQUEST_WIDTH)
ROW_WIDTH = tl.constexpr(verify_block.ROW_WIDTH)
SAMPLES = tl.constexpr(int(tree_walk.TreeWalk.SAMPLES))
# 32-bit numbers of a request
WALK, FIRST_ROW, NUM_ROWS, POSITION, TOP_K, IS_GREEDY, SCALE, MIN_WEIGHT = map(tl.constexpr, range(8))
STATE, TOP_P = tl.constexpr(4), tl.constexpr(5)  # in units of 64 bits
# of a row
TOKEN, FIRST_CHILD, NEXT_SIBLING, NUM_SAMPLED, DEPTH, REQUEST = map(tl.constexpr, range(6))
# Record of a row of logits: the sampled token, or any token with mass if the walk samples none (-1 = invalid logits);
# last id with the weight of the cut, and whether the row is one-hot; then float32 numbers
RECORD_WIDTH = tl.constexpr(10)
BEST, LAST, ONE_HOT, TOP, FACTOR, FLOOR, CUT, LEAST, TOTAL = map(tl.constexpr, range(9))

MIN_EXPONENT = tl.constexpr(-100.0)
STEPS_BIAS = tl.constexpr(786432.0)
STEPS_BITS = tl.constexpr(0x49400000)
C1 = tl.constexpr(float.fromhex("0x1.62e43p-1"))
C2 = tl.constexpr(float.fromhex("0x1.ebff92p-3"))
C3 = tl.constexpr(float.fromhex("0x1.c6b348p-5"))
UNIT = tl.constexpr(2.0**-42)
UNITS = tl.constexpr(2.0**42)
INTEGERS = tl.constexpr(2.0**23)  # float32 numbers from here on are integers
ONE_BITS = tl.constexpr(0x3F800000)
LOW_31 = tl.constexpr(0x7FFFFFFF)


@triton.jit
def compute_weights(exponents, table):
    """Return 2^exponent [N] for exponents of at most 0, and 0 below `MIN_EXPONENT`."""
    t = tl.maximum(exponents, MIN_EXPONENT - 1.0)
    shifted = t + STEPS_BIAS
    r = t - (shifted - STEPS_BIAS)  # exact
    q = ((r * C3 + C2) * r + C1) * r
    k = shifted.to(tl.int32, bitcast=True) - STEPS_BITS  # t = k / 16 + r
    e = tl.load(table + (k & 15))
    bits = (q * e + e).to(tl.int32, bitcast=True) + ((k >> 4) << 23)
    return tl.where(exponents >= MIN_EXPONENT, bits.to(tl.float32, bitcast=True), 0.0)


@triton.jit
def count_units(w):
    """Return float32 weights [N] in integer units of 2^-42, rounded to the nearest, ties to even."""
    y = w * UNITS
    nearest = (y + INTEGERS) - INTEGERS
    return tl.where(y < INTEGERS, nearest, y).to(tl.int64)


@triton.jit
def convert_to_order(x):
    """Return integers [N] in the order of float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & LOW_31)


@triton.jit
def find_largest(logits, vocab_size, TILE: tl.constexpr):
    """Find the largest logit of a row and its first id; the id is -1 if the logits are invalid."""
    largest = tl.full([TILE], float("-inf"), tl.float32)
    first = tl.zeros([TILE], tl.int32)
    is_broken = tl.zeros([TILE], tl.int32)
    for at in range(0, vocab_size, TILE):
        ids = at + tl.arange(0, TILE)
        x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        is_broken |= (x != x).to(tl.int32)
        first = tl.where(x > largest, ids, first)
        largest = tl.where(x > largest, x, largest)
    top = tl.max(largest, 0)
    index = tl.min(tl.where(largest == top, first, vocab_size), 0)
    is_valid = (tl.max(is_broken, 0) == 0) & (top > float("-inf")) & (top < float("inf"))
    return top, tl.where(is_valid, index, -1)


@triton.jit
def load_weights(logits, ids, inside, top, factor, floor, cut, last, least, table):
    """Return the weights of token ids [N] of a row after the filters."""
    x = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    w = compute_weights((x - top) * factor, table)
    is_kept = inside & (x >= floor) & ((w > cut) | ((w == cut) & (ids <= last))) & (w >= least)
    return tl.where(is_kept, w, 0.0)


@triton.jit
def load_probs(target, row, ids, inside):
    """Return the probabilities of token ids [N] of a row in float64, normalised as `Probs.from_row` does.

    The logits of the row must be valid. `target` is (logits, distance of rows, records, the same as float32, sums of
    float32 probabilities, table).
    """
    logits, logit_row, records, record_floats, totals, table = target
    at = row * RECORD_WIDTH
    if tl.load(records + at + ONE_HOT) > 0:
        p = (inside & (ids == tl.load(records + at + BEST))).to(tl.float64)
    else:
        top, factor = tl.load(record_floats + at + TOP), tl.load(record_floats + at + FACTOR)
        floor, cut = tl.load(record_floats + at + FLOOR), tl.load(record_floats + at + CUT)
        last, least = tl.load(records + at + LAST), tl.load(record_floats + at + LEAST)
        own = logits + row.to(tl.int64) * logit_row
        w = load_weights(own, ids, inside, top, factor, floor, cut, last, least, table)
        p = tl.div_rn(w, tl.load(record_floats + at + TOTAL) + tl.zeros_like(w)).to(tl.float64) / tl.load(totals + row)
    return p


@triton.jit
def is_row_valid(target, row):
    """Return whether the logits of a row are valid."""
    return tl.load(target[2] + row * RECORD_WIDTH + BEST) >= 0
