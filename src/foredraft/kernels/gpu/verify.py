"""Launches of a verification on the GPU: records of all rows, then the walks, and one block of results.

Nothing waits for the device, and the shapes follow from the sizes of the block alone, so a graph can capture it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.chain_walk import walk_chain
from foredraft.kernels.gpu.row_probs import RECORD_WIDTH
from foredraft.kernels.gpu.row_records import describe_drafts, describe_rows
from foredraft.kernels.gpu.tree_walks import walk_samples, walk_trials
from foredraft.kernels.gpu.verify_block import VerifyBlock
from foredraft.kernels.tree_walk import TreeWalk

SCRATCH_ITEM = 16  # bytes of a request and a token: the residual, and q without the siblings so far
LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class WalkPlan:
    """Sizes of the programs."""

    tile: int = 2048  # tokens that a program reads at once
    shortlist: int = 8192  # most tokens of a row that a filter searches apart from the others
    num_warps: int = 8
    max_scratch: int = 1 << 28  # bytes of residuals; more requests take another launch

    @property
    def options(self) -> dict[str, Any]:
        """Options of a launch."""
        return {"TILE": self.tile, "num_warps": self.num_warps, "enable_fp_fusion": False}


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
    num_rows = len(logits)
    if logits.dtype not in LOGIT_DTYPES or num_rows != block.num_rows or not (q is None or q.shape == logits.shape):
        other = "" if q is None else f" with q {list(q.shape)}"
        raise ForedraftError(
            f"logits {logits.dtype} {list(logits.shape)}{other} do not fit a step of {block.num_rows} rows; the types "
            f"are {', '.join(map(str, LOGIT_DTYPES))}"
        )
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    out = block.numbers.new_zeros(block.num_requests, 1 + 2 * block.most_rows)
    if not num_rows:
        return out
    with torch.cuda.device_of(logits):  # triton launches on the current device
        records, totals = _describe_rows(logits, block, plan)
        if TreeWalk.SAMPLES in block.walks:
            walk_samples[(block.num_requests,)](block.requests, block.rows, records, out, out.stride(0), num_warps=1)
        if not block.walks <= {TreeWalk.SAMPLES}:
            _walk_with_drafts(logits, q, block, records, totals, out, plan)
    return out


def _describe_rows(logits: Tensor, block: VerifyBlock, plan: WalkPlan) -> tuple[Tensor, Tensor]:
    """Return the records of all rows, and the sums of their float32 probabilities [R]."""
    num_rows, vocab_size = logits.shape
    requests = block.requests
    records = block.numbers.new_empty(num_rows * RECORD_WIDTH.value)
    totals = logits.new_empty(num_rows, dtype=torch.float64)
    shortlists = block.numbers.new_empty(num_rows, 2 * plan.shortlist)  # ids and weights
    describe_rows[(num_rows,)](
        logits, block.table, requests, requests.view(torch.float32), requests.view(torch.int64),
        requests.view(torch.float64), block.rows, records, records.view(torch.float32), totals, shortlists,
        logits.stride(0), vocab_size, LIST=plan.shortlist, **plan.options,
    )  # fmt: skip
    return records, totals


def _walk_with_drafts(
    logits: Tensor, q: Tensor | None, block: VerifyBlock, records: Tensor, totals: Tensor, out: Tensor, plan: WalkPlan
) -> None:
    """Launch the walks that read p and q, for as many requests at once as there is scratch."""
    num_rows, vocab_size = logits.shape
    drafts = logits if q is None else q if q.stride(1) == 1 else q.contiguous()
    draft_sums, draft_kinds = torch.empty_like(totals), block.numbers.new_empty(num_rows)
    if q is not None:
        describe_drafts[(num_rows,)](drafts, draft_kinds, draft_sums, drafts.stride(0), vocab_size, **plan.options)
    rows = (block.rows, records, records.view(torch.float32), totals, draft_kinds, draft_sums)
    inputs = (logits, drafts, block.table, block.requests, block.requests.view(torch.int64), *rows)
    strides = (logits.stride(0), drafts.stride(0), vocab_size)
    weights = totals.new_empty(block.num_requests, block.most_rows)
    group = min(max(plan.max_scratch // (SCRATCH_ITEM * vocab_size), 1), block.num_requests)
    scratch = totals.new_empty(group, 2, vocab_size)
    for first in range(0, block.num_requests, group):
        grid = (min(group, block.num_requests - first),)
        if TreeWalk.TRIALS in block.walks:
            walk_trials[grid](
                *inputs, scratch, out, first, out.stride(0), *strides, HAS_Q=q is not None, **plan.options
            )
        if TreeWalk.CHAIN in block.walks:
            walk_chain[grid](
                *inputs, scratch, weights, out, first, out.stride(0), block.most_rows, *strides,
                HAS_Q=q is not None, **plan.options,
            )  # fmt: skip
