"""Attention over paged KV for any token tree, without masks, split over keys.

A program computes LINES lines: the query heads of one key head for a few rows of one request. It reads the keys of
consecutive ranks in tiles. A tile that all its rows see is read once for all lines; the others are read row by row,
each through the slots of the row's own path. Ranks are divided into splits of a constant size. Every split has its own
softmax, and the splits of a row are joined in order. So the bits of a row depend on its own keys alone: not on the rows
beside it, on pages, on the tree, or on whether the splits of a row are one program or many.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.kernels.gpu.checks import check_attention
from foredraft.kernels.gpu.rows import DeviceRows

LINES = 16  # lines of a program: the smallest M of tl.dot, and the same for every pass of a model
MANY_LINES = 64
SPLIT = 256  # ranks of a split
TILE_BYTES = 16384  # most bytes of a tile of keys
MAX_TILE, MIN_TILE = 64, 16  # ranks of a tile
# From this number of programs on, one program computes all splits of its rows: the GPU is busy without more programs.
BUSY_PROGRAMS = 128
MIN_SPLITS = 3  # of a row; one program computes fewer in the time of a second launch
MAX_SCRATCH = 1 << 28  # bytes of the results of splits; above, one program computes all splits of its rows
NO_WINDOW = 1 << 30  # ranks; more than any sequence has
LOG2_E = tl.constexpr(1.4426950408889634)
JOIN_STAGES = tl.constexpr(4)  # loads of splits in flight
RUNTIME_ARGUMENTS = ["num_requests", "num_rows", "query_row", "query_head", "window"]


@dataclass(frozen=True)
class AttentionPlan:
    """Sizes of the programs. They depend on the model alone, so all passes of a model add in the same order."""

    lines: int
    rows: int  # rows of a program
    tile: int
    split: int = SPLIT
    num_warps: int = 4
    num_stages: int = 2
    busy_programs: int = BUSY_PROGRAMS

    @classmethod
    def make(cls, group: int, head_dim: int, itemsize: int, lines: int = LINES) -> "AttentionPlan":
        """Choose the sizes.

        Args:
            group: query heads of a key head.
            head_dim: the larger of the widths of keys and values.
            itemsize: bytes of a number in the cache.
            lines: lines of a program at least, a power of two. With more than 16, keys are read for more rows at once,
                and GPUs of capability 9.0 and newer may multiply by another instruction, with other bits. Default 16.
        """
        tile = TILE_BYTES // (pad_width(head_dim) * itemsize)
        padded = max(1 << (group - 1).bit_length(), lines)
        num_warps = 4 if padded < MANY_LINES else 8  # the sums of many lines do not fit the registers of four
        return cls(padded, padded // group, max(min(tile, MAX_TILE), MIN_TILE), num_warps=num_warps)


def pad_width(width: int) -> int:
    """Return the width of a tile that holds `width` numbers: a power of two, and at least the K of tl.dot."""
    return max(1 << (width - 1).bit_length(), LINES)


@triton.jit
def merge_softmax(m, mass, acc, m_next, mass_next, acc_next):  # [N], [N], [N, DV], twice
    """Add the keys of a later part to a softmax: largest score, sum of weights, sum of weighted values."""
    largest = tl.maximum(m, m_next)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # without any key yet: the difference would be NaN
    before, after = tl.exp2(m - base), tl.exp2(m_next - base)
    return largest, mass * before + mass_next * after, acc * before[:, None] + acc_next * after[:, None]


@triton.jit
def start_softmax(sinks, heads, M: tl.constexpr, DVP: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Start the softmax of M lines, of which an attention sink is the first part: a weight without a value."""
    m = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    if HAS_SINKS:
        m = tl.load(sinks + heads).to(tl.float32) * LOG2_E
        mass = tl.full([M], 1.0, tl.float32)
    return m, mass, tl.zeros([M, DVP], tl.float32)


@triton.jit
def compute_scores(q, k, scale, softcap, HAS_CAP: tl.constexpr, DOT_FP32: tl.constexpr):  # [M, D], [TILE, D]
    """Compute scores [M, TILE] in units of log2."""
    if DOT_FP32:
        dots = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32), input_precision="ieee")
    else:
        dots = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = dots * scale
    if HAS_CAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E) / softcap) + 1.0))  # tanh
    return scores * LOG2_E


@triton.jit
def add_tile(m, mass, acc, scores, v, DOT_FP32: tl.constexpr):  # [M], [M], [M, DV], [M, TILE], [TILE, DV]
    """Add a tile of keys to the softmax of every line. A score of -inf adds nothing, and not even a rounding."""
    largest = tl.maximum(m, tl.max(scores, 1))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores - base[:, None])
    before = tl.exp2(m - base)
    mass = mass * before + tl.sum(weights, 1)
    if DOT_FP32:
        rounded = weights.to(v.dtype).to(tl.float32)
        acc = tl.dot(rounded, v.to(tl.float32), acc * before[:, None], input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc * before[:, None], input_precision="ieee")
    return largest, mass, acc


@triton.jit
def load_tile(
    keys, values, slots, is_read, kv_head,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Load keys [TILE, DP] and values [TILE, DVP] of slots [TILE]; zeros where nothing is read."""
    row = slots.to(tl.int64) * KV_HEADS + kv_head
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    k = tl.load(keys + row[:, None] * D + d[None, :], mask=is_read[:, None] & (d < D)[None, :], other=0.0)
    v = tl.load(values + row[:, None] * DV + dv[None, :], mask=is_read[:, None] & (dv < DV)[None, :], other=0.0)
    return k, v


@triton.jit
def find_request(first_row, num_requests, block, ROWS: tl.constexpr):
    """Find the request of a block of rows. Request b has its blocks from first_row[b] // ROWS + b on."""
    low, high = 0, num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(first_row + middle) // ROWS + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def attend_split(
    q, keys, values, pages, tails, path, start, rank, line_row, num_rows, shared, low, split, kv_head, scale, softcap,
    window,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, HAS_CAP: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Attend to the ranks of one split; returns m [M], mass [M], acc [M, DV].

    Ranks below `shared` are seen by all rows of the program, and lie in slots of its first row. `path` and `rank` are
    those of the lines [M]: index in `tails` of the first slot, and last rank. `low` is the first rank of any row.
    """
    m = tl.full([M], float("-inf"), tl.float32)
    mass = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DVP], tl.float32)
    first_path = tl.min(path, 0)
    last = tl.max(rank, 0)
    begin = tl.maximum(split * SPLIT, low // TILE * TILE)
    end = tl.minimum((split + 1) * SPLIT, last + 1)
    middle = tl.minimum(tl.maximum(shared // TILE * TILE, begin), end)
    for at in range(begin, middle, TILE):
        ranks = at + tl.arange(0, TILE)
        is_committed = ranks < start
        page = tl.load(pages + ranks // PAGE, mask=is_committed, other=0)
        own = tl.load(tails + (first_path + ranks - start), mask=ranks >= start, other=0)
        slots = tl.where(is_committed, page * PAGE + ranks % PAGE, own)
        k, v = load_tile(keys, values, slots, ranks >= low, kv_head, KV_HEADS, D, DV, DP, DVP)
        scores = compute_scores(q, k, scale, softcap, HAS_CAP, DOT_FP32)
        is_near = ranks[None, :] > rank[:, None] - window
        m, mass, acc = add_tile(m, mass, acc, tl.where(is_near, scores, float("-inf")), v, DOT_FP32)
    is_chain = tl.min(path, 0) == tl.max(path, 0)
    for at in range(middle, end, TILE):
        for row in range(tl.where(is_chain, 1, num_rows)):
            is_mine = is_chain | (line_row == row)
            ranks = at + tl.arange(0, TILE)
            row_path = tl.max(tl.where(is_mine, path, 0), 0)
            is_read = (ranks >= low) & (ranks <= tl.max(tl.where(is_mine, rank, 0), 0))
            is_committed = ranks < start
            page = tl.load(pages + ranks // PAGE, mask=is_committed & is_read, other=0)
            own = tl.load(tails + (row_path + ranks - start), mask=(ranks >= start) & is_read, other=0)
            slots = tl.where(is_committed, page * PAGE + ranks % PAGE, own)
            k, v = load_tile(keys, values, slots, is_read, kv_head, KV_HEADS, D, DV, DP, DVP)
            scores = compute_scores(q, k, scale, softcap, HAS_CAP, DOT_FP32)
            # Zero times a NaN is NaN. Values of a broken row become zeros, and the rows that see them become NaN.
            is_finite = tl.abs(v.to(tl.float32)) < float("inf")
            is_broken = tl.min(is_finite.to(tl.int32), 1) == 0
            scores = tl.where(is_broken[None, :], float("nan"), scores)
            v = tl.where(is_finite, v, 0.0)
            is_seen = (ranks[None, :] <= rank[:, None]) & (ranks[None, :] > rank[:, None] - window) & is_mine[:, None]
            m, mass, acc = add_tile(m, mass, acc, tl.where(is_seen, scores, float("-inf")), v, DOT_FP32)
    return m, mass, acc


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attend_part(
    query, keys, values, out, parts, sums, sinks,
    pages, page_at, tails, tail_at, starts, tail, first_row,
    num_requests, num_rows, query_row, query_head, window, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr,
    DVP: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, IS_WHOLE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Attend with one block of rows to one split, or to all splits if IS_WHOLE. Grid (blocks, KV heads, splits)."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = find_request(first_row, num_requests, block, ROWS)
    request_row = tl.load(first_row + request)
    row_0 = request_row + (block - request_row // ROWS - request) * ROWS
    count = tl.minimum(tl.load(first_row + request + 1) - row_0, ROWS)
    if count <= 0:  # the blocks of a request are rounded up, so some have no rows
        return
    line = tl.arange(0, M)
    line_row = line // GROUP
    is_line = line_row < count
    row = row_0 + tl.minimum(line_row, count - 1)  # lines without a row repeat the last one and are not stored
    head = kv_head * GROUP + line % GROUP
    start = tl.load(starts + row_0)
    path = tl.load(tail_at + row)
    rank = start + tl.load(tail + row) - 1
    low = tl.maximum(tl.min(rank, 0) - window + 1, 0)
    last = tl.max(rank, 0)
    first_split, last_split = low // SPLIT, last // SPLIT
    if (not IS_WHOLE) and ((split < first_split) | (split > last_split)):
        return
    # rows of a chain have one path and see all of it up to themselves; paths of a tree share the committed ranks
    shared = tl.where(tl.min(path, 0) == tl.max(path, 0), tl.min(rank, 0) + 1, start)
    d = tl.arange(0, DP)
    at = row.to(tl.int64) * query_row + head * query_head
    q = tl.load(query + at[:, None] + d[None, :], mask=is_line[:, None] & (d < D)[None, :], other=0.0)
    pages += tl.load(page_at + row_0)
    dv = tl.arange(0, DVP)
    target = row.to(tl.int64) * HEADS + head
    is_stored = is_line[:, None] & (dv < DV)[None, :]
    if IS_WHOLE:
        m, mass, acc = start_softmax(sinks, head, M, DVP, HAS_SINKS)
        for s in range(first_split, last_split + 1):
            m_s, mass_s, acc_s = attend_split(
                q, keys, values, pages, tails, path, start, rank, line_row, count, shared, low, s, kv_head, scale,
                softcap, window, KV_HEADS, D, DV, DP, DVP, PAGE, M, TILE, SPLIT, HAS_CAP, DOT_FP32,
            )  # fmt: skip
            m, mass, acc = merge_softmax(m, mass, acc, m_s, mass_s, acc_s)
        result = acc / tl.where(is_line, mass, 1.0)[:, None]
        tl.store(out + target[:, None] * DV + dv[None, :], result.to(out.dtype.element_ty), mask=is_stored)
    else:
        m, mass, acc = attend_split(
            q, keys, values, pages, tails, path, start, rank, line_row, count, shared, low, split, kv_head, scale,
            softcap, window, KV_HEADS, D, DV, DP, DVP, PAGE, M, TILE, SPLIT, HAS_CAP, DOT_FP32,
        )  # fmt: skip
        target += split * (num_rows.to(tl.int64) * HEADS)
        tl.store(parts + target[:, None] * DV + dv[None, :], acc, mask=is_stored)
        tl.store(sums + target * 2, m, mask=is_line)
        tl.store(sums + target * 2 + 1, mass, mask=is_line)


@triton.jit(do_not_specialize=["num_rows", "window"])
def attend_join(
    parts, sums, sinks, out, starts, tail, num_rows, window,
    HEADS: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Join the splits of one row and head in order. Grid (rows, heads)."""
    row, head = tl.program_id(0), tl.program_id(1)
    rank = tl.load(starts + row) + tl.load(tail + row) - 1
    low = tl.maximum(rank - window + 1, 0)
    dv = tl.arange(0, DVP)
    one = tl.arange(0, 1)
    target = row.to(tl.int64) * HEADS + head
    m, mass, acc = start_softmax(sinks, head + one, 1, DVP, HAS_SINKS)
    for split in tl.range(low // SPLIT, rank // SPLIT + 1, num_stages=JOIN_STAGES):
        at = target + split * (num_rows.to(tl.int64) * HEADS)
        m_s, mass_s = tl.load(sums + at * 2 + one), tl.load(sums + at * 2 + 1 + one)
        acc_s = tl.load(parts + at * DV + one[:, None] + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        m, mass, acc = merge_softmax(m, mass, acc, m_s, mass_s, acc_s)
    result = acc / mass[:, None]
    offsets = target * DV + one[:, None] + dv[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=(dv < DV)[None, :])


def uses_scratch(plan: AttentionPlan, rows: DeviceRows, window: int, heads: int, kv_heads: int, width: int) -> bool:
    """Return whether each split is a program of its own, whose results are joined by a second launch.

    The bits of the output are the same. The choice is for speed: a few rows over many keys need more programs.

    Args:
        plan: sizes of the programs.
        rows: what each row sees.
        window: keys that a row sees at most.
        heads: query heads.
        kv_heads: key heads.
        width: numbers of a value.
    """
    num_splits = -(-rows.longest // plan.split)
    num_seen = min(num_splits, -(-window // plan.split) + 1)  # splits that a row sees
    programs = (rows.num_rows // plan.rows + rows.num_requests) * kv_heads
    scratch = 4 * num_splits * rows.num_rows * heads * (width + 2)
    return num_seen >= MIN_SPLITS and programs < plan.busy_programs and scratch <= MAX_SCRATCH


def attend(
    query: Tensor,  # [T, Hq, D]
    keys: Tensor,  # [S, Hkv, D]
    values: Tensor,  # [S, Hkv, Dv]
    rows: DeviceRows,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [Hq]
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Compute attention over paged KV.

    Args:
        query: queries of T rows.
        keys: keys of every slot.
        values: values of every slot.
        rows: what each row sees.
        scale: factor of the dot products.
        window: keys that a row sees at most, its own included. Default 0 = all.
        softcap: bound of the scores. Default 0 = none.
        sinks: score of each head's attention sink. Default None = no sinks.
        plan: sizes of the programs. Default None = those of the model.

    Returns:
        [T, Hq, Dv] in the type of the queries.

    Raises:
        ForedraftError: the kernel does not take these tensors.
    """
    check_attention(query, keys, values, sinks)
    (num_rows, heads, d), (kv_heads, dv) = query.shape, values.shape[1:]
    if query.stride(2) != 1:
        query = query.contiguous()
    plan = plan or AttentionPlan.make(heads // kv_heads, max(d, dv), keys.element_size())
    out = query.new_empty(num_rows, heads, dv)
    reach = window or NO_WINDOW
    has_parts = uses_scratch(plan, rows, reach, heads, kv_heads, dv)
    num_splits = -(-rows.longest // plan.split) if has_parts else 1
    parts = query.new_empty((num_splits, num_rows, heads, dv) if has_parts else (0,), dtype=torch.float32)
    sums = query.new_empty((num_splits, num_rows, heads, 2) if has_parts else (0,), dtype=torch.float32)
    sinks_or_none = out if sinks is None else sinks.contiguous()  # not read without sinks
    with torch.cuda.device_of(query):  # triton launches on the current device
        attend_part[(num_rows // plan.rows + rows.num_requests, kv_heads, num_splits)](
            query, keys, values, out, parts, sums, sinks_or_none,
            rows.pages, rows.page_at, rows.tails, rows.tail_at, rows.start, rows.tail, rows.first_row,
            rows.num_requests, num_rows, query.stride(0), query.stride(1), reach, float(scale), float(softcap),
            HEADS=heads, KV_HEADS=kv_heads, D=d, DV=dv, DP=pad_width(d), DVP=pad_width(dv), PAGE=rows.page_size,
            M=plan.lines, ROWS=plan.rows, TILE=plan.tile, SPLIT=plan.split, IS_WHOLE=not has_parts,
            HAS_CAP=softcap != 0, HAS_SINKS=sinks is not None, DOT_FP32=query.device.type == "cpu",
            num_warps=plan.num_warps, num_stages=plan.num_stages, enable_fp_fusion=False,
        )  # fmt: skip
        if has_parts:
            attend_join[(num_rows, heads)](
                parts, sums, sinks_or_none, out, rows.start, rows.tail, num_rows, reach,
                HEADS=heads, DV=dv, DVP=pad_width(dv), SPLIT=plan.split, HAS_SINKS=sinks is not None,
                num_warps=1, enable_fp_fusion=False,
            )  # fmt: skip
    return out
