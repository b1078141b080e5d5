"""Parallel drafting of P-EAGLE (2602.01469): one pass gives the distributions of all draft tokens.

The pass has the pending pairs of a request and, behind the pair of the root, one row per further draft token. Such a
row has the mask token and a learnt feature. It sees the rows before it, and no draft token, so all nodes of one depth
have the same distribution. The KV entries of these rows are overwritten by the next pass.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.common.feature_drafter import FeatureDrafter, PendingPairs, RootOutput
from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.parallel_levels import grow_from_rows
from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.eagle3.network import Eagle3Network
from foredraft.drafters.method import DrafterContext
from foredraft.models.feature_lm import FeatureLM
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.path_features import read_all


@dataclass
class MaskedPass:
    """Rows of one pass over several drafts."""

    spans: list[Span] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)  # [rows, H] of the network's width
    logit_rows: list[int] = field(default_factory=list)
    num_rows: int = 0

    def add(self, span: Span, features: list[Tensor], num_pairs: int) -> None:
        """Add a span that starts with pairs; the last pair and all masks have logits."""
        self.spans.append(span)
        self.features += features
        self.logit_rows += range(self.num_rows + max(num_pairs - 1, 0), self.num_rows + len(span.tokens))
        self.num_rows += len(span.tokens)


class ParallelDrafter(FeatureDrafter):
    """Drafter of a head with masks. Arguments as those of `FeatureDrafter`; `network` is that of `lm`."""

    def __init__(self, lm: FeatureLM, network: Eagle3Network, tree_spec: TreeSpec, context: DrafterContext) -> None:
        super().__init__(lm, network.shape.hidden_layers, tree_spec, context, network.token_ids)
        self.network = network

    @torch.inference_mode()
    def _grow_drafts(self, drafts: list[GrowingKVDraft], page_size: int) -> None:
        """Compute the pending pairs and the masks of all drafts in one pass, and grow the drafts from it."""
        grow_from_rows(drafts, self._compute_rows(drafts, page_size), self._make_node_logits)

    def _compute_rows(self, drafts: list[GrowingKVDraft], page_size: int) -> list[Tensor]:
        """Compute the logits [depth, W] of each draft."""
        masked, pending_by_draft = MaskedPass(), [self._pending.get(d.builder.request.slot) for d in drafts]
        for draft, pending in zip(drafts, pending_by_draft, strict=True):
            self._add_draft(masked, draft, pending)
        if not masked.spans:
            return [self._root_outputs[draft.builder.request.slot].logits for draft in drafts]
        batch = ForwardBatch.build(masked.spans, masked.logit_rows, page_size, self.context.device)
        logits, outputs = self.lm.forward(batch, torch.cat(masked.features))
        results, first_row, first_logit = [], 0, 0
        for draft, pending in zip(drafts, pending_by_draft, strict=True):
            slot, depth = draft.builder.request.slot, draft.builder.tree_spec.num_levels
            count = depth if pending is not None else depth - 1
            rows = logits[first_logit : first_logit + count]
            if pending is None:
                rows = torch.cat([self._root_outputs[slot].logits, rows])
            else:
                root_row = first_row + len(pending.tokens) - 1
                self._root_outputs[slot] = RootOutput(rows[:1].clone(), outputs[root_row : root_row + 1].clone())
                self.draft_kv.num_valid[slot] = self.draft_kv.num_valid.get(slot, 0) + len(pending.tokens)
                del self._pending[slot]
                first_row += len(pending.tokens)
            first_row, first_logit = first_row + depth - 1, first_logit + count
            results.append(rows)
        return results

    def _add_draft(self, masked: MaskedPass, draft: GrowingKVDraft, pending: PendingPairs | None) -> None:
        """Add the pending pairs and the masks of a draft to a pass."""
        request, num_masks = draft.builder.request, draft.builder.tree_spec.num_levels - 1
        pairs = [] if pending is None else pending.tokens
        tokens = [*pairs, *[self.network.mask_token_id] * num_masks]
        if not tokens:
            return
        features = [] if pending is None else [self.lm.project_features(read_all(pending.features))]
        features.append(self.network.project_mask().expand(num_masks, -1))
        start = self.draft_kv.num_valid.get(request.slot, 0)
        span = Span(request.pages, start, tokens, range(len(tokens)), source=request.spec.source)
        masked.add(span, features, len(pairs))
