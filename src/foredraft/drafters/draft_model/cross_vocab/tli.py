"""Token-level intersection (TLI): a draft model of another vocabulary drafts only tokens that the target has too.

q is the draft model's distribution over the shared tokens, in target ids, with the request's sampling parameters. Draft
tokens are sampled from this q, so every verification rule stays lossless.

Reference: 2502.05202, algorithm 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.level_loop import grow_levels
from foredraft.drafters.common.tree_builder import NodeLogits, TreeBuilder, TreeSpec
from foredraft.drafters.draft import Draft
from foredraft.drafters.draft_model.cross_vocab.base import PAGE_SIZE, CrossVocabDrafter, CrossVocabState
from foredraft.kv.pool import compact_accepted
from foredraft.models.forward_batch import Span
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


class SharedTokens(NamedTuple):
    """Tokens that target and draft model share."""

    draft_by_target: dict[int, int]  # draft token by target token
    target_ids: Tensor  # [W] rising
    draft_ids: Tensor  # [W] the same tokens in draft ids


@dataclass
class TliDraft(GrowingKVDraft):
    """Growing draft of one request, in target tokens, with the state that has its pages."""

    state: CrossVocabState = field(kw_only=True)


class TliDrafter(CrossVocabDrafter):
    """Drafter of chains and trees of shared tokens by TLI."""

    vocab_option = "tli"

    @cached_property
    def _shared_tokens(self) -> SharedTokens:
        pairs = self.vocab_map.shared_tokens.items()
        draft_tokens = {token: o for token, o in pairs if token < self.context.vocab_size and o < self.lm.vocab_size}
        device = self.context.device
        return SharedTokens(
            draft_tokens,
            torch.tensor(list(draft_tokens), device=device),
            torch.tensor(list(draft_tokens.values()), device=device),
        )

    def count_written_tokens(self, tree_spec: TreeSpec) -> int:
        return tree_spec.max_nodes

    def propose(self, batch: Batch) -> TokenTree:
        for state in self._states.values():  # a step that failed may have left a draft
            state.draft = None
        return super().propose(batch)

    def draft_batch(self, states: Sequence[CrossVocabState]) -> list[Draft]:
        drafts = [
            TliDraft(
                TreeBuilder(state.request, state.tree_spec, draft_stream=state.draft_stream),
                start=state.num_tokens - 1,
                state=state,
            )
            for state in states
        ]
        logits = self.prefill(states)
        for draft in drafts:
            draft.state.draft = draft
        grow_levels(drafts, self._make_node_logits(logits), self._compute_level)
        return [draft.builder.to_draft() for draft in drafts]

    def _compute_level(self, drafts: Sequence[TliDraft]) -> NodeLogits:
        return self._make_node_logits(self.forward([self._build_span(draft) for draft in drafts], last_only=False))

    def _make_node_logits(self, logits: Tensor) -> NodeLogits:
        """Return the logits of the shared tokens from those of all draft-model tokens."""
        shared = self._shared_tokens
        return NodeLogits(logits[:, shared.draft_ids], self.context.vocab_size, shared.target_ids)

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Move the KV of accepted nodes to their final slots."""
        super().observe(batch, commit)
        starts, paths, pages = [], [], []
        for b, request in enumerate(batch.requests):
            state = self._states.get(request.slot)
            if state is None or state.draft is None:
                continue
            draft, state.draft = state.draft, None  # cleared first, so that a fault below cannot reuse it
            verified_nodes, offset = draft.builder.verified_nodes, batch.num_new_tokens[b] - 1
            path = [node - offset for node in commit.paths[b][offset:]]
            # later nodes belong to other drafters of a merged tree
            nodes = [verified_nodes[node] for node in path if node < len(verified_nodes)]
            written = [node for node in nodes if node in draft.offsets]  # the last node may have no KV
            starts.append(draft.start)
            paths.append([draft.offsets[node] for node in written])
            pages.append(state.pages)
            draft_tokens = [self._shared_tokens.draft_by_target[draft.builder.tokens[node - 1]] for node in written[1:]]
            state.retokenizer.append_draft(draft_tokens, state.num_tokens + len(draft_tokens))
        compact_accepted(self.lm.pool, paths, starts, pages, PAGE_SIZE, self.context.device)

    def _build_span(self, draft: TliDraft) -> Span:
        span = draft.build_span()
        return span._replace(
            pages=draft.state.pages, tokens=[self._shared_tokens.draft_by_target[token] for token in span.tokens]
        )
