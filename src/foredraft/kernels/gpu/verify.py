"""Launches of a verification on the GPU: records of all rows, then the walks, and one block of results.

Nothing waits for the device, and the shapes follow from the sizes of the block alone, so a graph can capture it.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.chain_walk import walk_chain
from foredraft.kernels.gpu.row_probs import RECORD_WIDTH
from foredraft.kernels.gpu.row_records import describe_drafts, describe_rows
from foredraft.kernels.gpu.tree_walks import walk_samples, walk_trials
from foredraft.kernels.gpu.verify_block import DeviceWalk, VerifyBlock

LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class WalkPlan:
    """Sizes of the programs."""

    tile: int = 2048  # tokens that a program reads at once
    shortlist: int = 8192  # most tokens of a row that a filter searches apart from the others
    num_warps: int = 8
    max_scratch: int = 1 << 28  # bytes of residuals; more requests take another launch


def walk_trees(logits: Tensor, q: Tensor | None, block: VerifyBlock, plan: WalkPlan = WalkPlan()) -> Tensor:
    """Verify the trees of a step.

    Args:
        logits: [R, V] of all scored rows, bfloat16, float16 or float32.
        q: [R, V] of the same rows, or None.
        block: trees and settings of B requests, on the device of the logits.
        plan: sizes of the programs.

    Returns:
        [B, 1 + 2 * rows] int32: number of pairs, then pairs of a node counted from the root and the token after it. A
        request with rows and without pairs has invalid logits at its root.

    Raises:
        ForedraftError: the shapes or types differ from these.
    """
    (num_rows, vocab_size) = logits.shape
    if logits.dtype not in LOGIT_DTYPES or num_rows != block.num_rows or not (q is None or q.shape == logits.shape):
        other = "" if q is None else f" with q {list(q.shape)}"
        raise ForedraftError(
            f"logits {logits.dtype} {list(logits.shape)}{other} do not fit a step of {block.num_rows} rows; the types "
            f"are {', '.join(map(str, LOGIT_DTYPES))}"
        )
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    drafts = logits if q is None else q if q.stride(1) == 1 else q.contiguous()
    out = block.numbers.new_zeros(block.num_requests, 1 + 2 * block.most_rows)
    if not num_rows:
        return out
    records = block.numbers.new_empty(num_rows * RECORD_WIDTH.value)
    totals = logits.new_empty(num_rows, dtype=torch.float64)
    draft_sums, draft_kinds = torch.empty_like(totals), block.numbers.new_empty(num_rows)
    shortlists = block.numbers.new_empty(num_rows, 2 * plan.shortlist)  # ids and weights
    requests, floats = block.requests, records.view(torch.float32)
    longs = requests.view(torch.int64)
    sizes = {"TILE": plan.tile, "num_warps": plan.num_warps, "enable_fp_fusion": False}
    with torch.cuda.device_of(logits):  # triton launches on the current device
        describe_rows[(num_rows,)](
            logits, block.table, requests, requests.view(torch.float32), longs, requests.view(torch.float64),
            block.rows, records, floats, totals, shortlists, logits.stride(0), vocab_size, LIST=plan.shortlist, **sizes,
        )  # fmt: skip
        if DeviceWalk.SAMPLES in block.walks:
            walk_samples[(block.num_requests,)](requests, block.rows, records, out, out.stride(0), num_warps=1)
        if block.walks <= {DeviceWalk.SAMPLES}:
            return out
        if q is not None:
            describe_drafts[(num_rows,)](drafts, draft_kinds, draft_sums, drafts.stride(0), vocab_size, **sizes)
        inputs = (logits, drafts, block.table, requests, longs, block.rows, records, floats, totals, draft_kinds, draft_sums)
        strides = (logits.stride(0), drafts.stride(0), vocab_size)
        weights = logits.new_empty(block.num_requests, block.most_rows, dtype=torch.float64)
        group = min(max(plan.max_scratch // (16 * vocab_size), 1), block.num_requests)
        scratch = logits.new_empty(group, 2, vocab_size, dtype=torch.float64)
        for first in range(0, block.num_requests, group):
            grid = (min(group, block.num_requests - first),)
            if DeviceWalk.TRIALS in block.walks:
                walk_trials[grid](*inputs, scratch, out, first, out.stride(0), *strides, HAS_Q=q is not None, **sizes)
            if DeviceWalk.CHAIN in block.walks:
                walk_chain[grid](
                    *inputs, scratch, weights, out, first, out.stride(0), block.most_rows, *strides,
                    HAS_Q=q is not None, **sizes,
                )  # fmt: skip
    return out
