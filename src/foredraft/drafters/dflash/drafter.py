"""DFlash (2602.06036): one pass fills a block of masks after the last committed token.

Row j of the block gives the distribution of the j-th token after the root. The rows do not see sampled tokens, so all
nodes of one depth have the same distribution, and a tree of any shape costs one pass. With a Markov head (DSpark) the
distribution of a node also depends on the tokens of its path.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.drafters.common.last_hidden_state import can_run_native
from foredraft.drafters.common.level_loop import start_builder
from foredraft.drafters.common.mismatch_warning import MismatchDetector
from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.dflash.block_levels import BlockDraft, BlockLevels
from foredraft.drafters.dflash.context_rows import ContextRows
from foredraft.drafters.dflash.native_block import NativeBlock
from foredraft.drafters.dflash.network import DFlashNetwork
from foredraft.drafters.draft import to_token_tree
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.spec import DrafterSpec
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


class DFlash:
    """Drafter of a DFlash head.

    Args:
        network: the head, on the device and in the dtype of the context.
        tree_spec: limits and shape of the draft, at most as deep as a block.
        context: target, device and vocabulary.
    """

    def __init__(self, network: DFlashNetwork, tree_spec: TreeSpec, context: DrafterContext) -> None:
        self.network = network
        self.tree_spec = tree_spec
        self.min_confidence = 0.0
        if network.confidence_head is not None and tree_spec.is_chain:  # its predictions replace the draft's own
            self.min_confidence = tree_spec.min_confidence
            self.tree_spec = replace(tree_spec, min_confidence=0.0)
        self.context = context
        self.native = NativeBlock.from_network(network) if can_run_native(context) else None
        self.rows = ContextRows(network, context.device, self.native)
        self.mismatch_detector = MismatchDetector(context)
        self.spec = DrafterSpec(
            tree_spec.max_nodes,
            network.shape.hidden_layers,
            missed_states="end",  # a block reads all rows before it
            draft_kv=self.rows.draft_kv,
            is_chain=tree_spec.is_chain,
            silence_mismatch=self.mismatch_detector.silence,
            is_native=self.native is not None,
        )

    def propose(self, batch: Batch) -> TokenTree:
        drafts = {b: draft for b in batch.find_drafting() if (draft := self._start_draft(batch, b)) is not None}
        if drafts:
            self._grow_drafts(list(drafts.values()), batch.page_size)
        tree = to_token_tree(batch, {b: draft.to_draft() for b, draft in drafts.items()})
        self.mismatch_detector.record_proposal(batch, tree)
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.mismatch_detector.record_commit(batch, commit)
        self.rows.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self.rows.forget(slots)

    @torch.inference_mode()
    def compute_states(self, requests: Sequence[Request], page_size: int, depth: int) -> Tensor:
        """Compute the states [n, depth, H] of the rows after the last committed tokens of n requests."""
        self.rows.write_pending([request.slot for request in requests])
        first = self.network.shape.first_row
        if self.native is not None:
            pool = self.rows.draft_kv.pool
            return self.native.compute_states(requests, pool, page_size, self.rows.num_pages)[:, first : first + depth]
        starts = torch.tensor([[request.num_tokens - 1] for request in requests], device=self.context.device)
        roots = torch.tensor(
            [[request.get_token(request.num_tokens - 1)] for request in requests], device=self.context.device
        )
        states: Tensor = self.network(roots, starts, self.rows.gather(requests, page_size))[:, 0]
        return states[:, first : first + depth]

    def _start_draft(self, batch: Batch, b: int) -> BlockDraft | None:
        """Start the draft of request b. Returns None without room, or if context rows are missing."""
        request = batch.requests[b]
        num_rows = self.rows.count_rows(request.slot)
        if not num_rows or num_rows != request.num_tokens - 1:
            return None
        builder = start_builder(self.tree_spec, batch, b, self.tree_spec.max_depth)
        return None if builder is None else BlockDraft(builder, min_confidence=self.min_confidence)

    @torch.inference_mode()
    def _grow_drafts(self, drafts: list[BlockDraft], page_size: int) -> None:
        """Grow all drafts from one pass over their blocks."""
        depth = max(draft.builder.tree_spec.max_depth for draft in drafts)
        states = self.compute_states([draft.builder.request for draft in drafts], page_size, depth)
        BlockLevels(self.network, states, drafts, self.context.vocab_size).grow()
