"""Chimera (2402.15758): short-range context from the last three tokens, long-range context from the target's states.

The context encoder is a decoder layer with its own KV cache. Entry t holds token t with the target's state t. From the
last committed token on, that state is not computed yet; the output of the trigram encoder replaces it, and a later pass
overwrites the entry. States stay pending until the request drafts; the pass for the root computes them.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from foredraft.drafters.chimera.network import TRIGRAM_TOKENS, ChimeraHeadRunner, ChimeraNetwork
from foredraft.drafters.common.feature_drafter import FeatureDrafter, PendingPairs, make_feature_lm
from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.last_hidden_state import LinearFactory, stack_states
from foredraft.drafters.common.level_loop import LevelStates, grow_levels
from foredraft.drafters.common.tree_builder import NodeLogits, TreeBuilder, TreeSpec
from foredraft.drafters.method import DrafterContext
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.path_features import read_all
from foredraft.request import Request


class Chimera(FeatureDrafter):
    """Drafter with Chimera heads. Pending states are handled as in FeatureDrafter.

    A position holds a token with its own state, so an entry needs no token after it (`token_lookahead` is 0).
    """

    def __init__(self, network: ChimeraNetwork, tree_spec: TreeSpec, context: DrafterContext) -> None:
        # before `make_feature_lm`, whose native code takes over the weights of the context encoder
        self.head_runner = ChimeraHeadRunner(network, LinearFactory(context))
        super().__init__(
            make_feature_lm(network, ChimeraNetwork.make_native, context),
            network.shape.hidden_layers,
            tree_spec,
            context,
        )
        self.draft_kv.token_lookahead = 0
        self._last_states: dict[int, Tensor] = {}  # slot -> [H] target state of the last computed entry

    def forget(self, slots: Sequence[int]) -> None:
        super().forget(slots)
        for slot in slots:
            self._last_states.pop(slot, None)

    def _select_pair_tokens(self, request: Request, following: Sequence[int]) -> Sequence[int]:
        return [request.get_token(request.num_computed), *following[:-1]]

    def _has_root_output(self, slot: int) -> bool:
        # A Chimera draft starts from the target state at the last entry, not from an output of the encoder.
        return slot in self._last_states or slot in self._pending

    def _compute_pending(self, slots: Iterable[int]) -> None:
        """Compute all pending entries of these slots in one forward pass."""
        late = [self._pending[slot] for slot in slots if slot in self._pending]
        if late:
            states = self._project_pending(late)
            self._run_pass(
                [self._build_pending_span(pending, []) for pending in late], torch.cat(states), late[0].page_size
            )
            self._mark_computed(late, states)

    def _grow_drafts(self, drafts: list[GrowingKVDraft], page_size: int) -> None:
        """Grow all drafts level by level; head `depth` predicts the tokens at depth + 1."""
        encoded = self._encode_roots(drafts, page_size)
        roots = LevelStates(stack_states([self._last_states[draft.builder.request.slot] for draft in drafts]))
        roots.start(drafts)  # the rows stay those of the roots: every head reads the target's state there
        logits = NodeLogits(self.head_runner(0, encoded, roots.states), self.context.vocab_size)
        grow_levels(drafts, logits, partial(self._compute_head_level, roots.states, page_size))

    def _compute_head_level(self, root_states: Tensor, page_size: int, drafts: list[GrowingKVDraft]) -> NodeLogits:
        """Run the context encoder over the frontiers, and the head of their depth."""
        frontier = [(draft, node) for draft in drafts for node in draft.builder.frontier]
        depth = frontier[0][0].builder.depths[frontier[0][1]]
        rows = [draft.rows[0] for draft, _ in frontier]
        last = [_collect_last_tokens(draft.builder, node) for draft, node in frontier]
        spans = [draft.build_span() for draft in drafts]
        encoded = self._run_pass(spans, self.head_runner.encode_trigrams(last), page_size)
        states = root_states if rows == list(range(len(root_states))) else root_states[rows]
        return NodeLogits(self.head_runner(depth, encoded, states), self.context.vocab_size)

    def _encode_roots(self, drafts: Sequence[GrowingKVDraft], page_size: int) -> Tensor:
        """Compute the context encoder's output [B, H] at every root, together with the pending entries."""
        pending_by_draft = {b: self._pending.get(draft.builder.request.slot) for b, draft in enumerate(drafts)}
        late = [pending for pending in pending_by_draft.values() if pending is not None]
        states = self._project_pending(late)
        target_states = iter(states)
        root_states = self.head_runner.encode_trigrams([_collect_last_tokens(draft.builder, 0) for draft in drafts])
        spans, inputs, ends = [], [], []
        total = 0
        for b, draft in enumerate(drafts):
            request, pending = draft.builder.request, pending_by_draft[b]
            root = request.get_token(draft.start)
            if pending is None:
                spans.append(Span(request.pages, draft.start, [root], [0]))
            else:
                spans.append(self._build_pending_span(pending, [root]))
                inputs.append(next(target_states))
            inputs.append(root_states[b : b + 1])
            total += len(spans[-1].tokens)
            ends.append(total - 1)
        encoded = self._run_pass(spans, torch.cat(inputs), page_size)
        self._mark_computed(late, states)
        return encoded if len(ends) == len(encoded) else encoded[ends]

    def _build_pending_span(self, pending: PendingPairs, extra_tokens: list[int]) -> Span:
        """Build the span of a request's pending entries, with more tokens after them."""
        tokens = pending.tokens + extra_tokens
        return Span(
            pending.request.pages, self.draft_kv.num_valid.get(pending.request.slot, 0), tokens, range(len(tokens))
        )

    def _project_pending(self, late: Sequence[PendingPairs]) -> list[Tensor]:
        """Project the pending target states of each request to [n, H]."""
        if not late:
            return []
        rows = read_all([features for pending in late for features in pending.features])
        states = self.head_runner.project_features(rows)
        return list(torch.split(states, [len(pending.tokens) for pending in late]))

    def _mark_computed(self, late: Sequence[PendingPairs], states: Sequence[Tensor]) -> None:
        """Record that pending entries are in the draft KV; called after the forward pass, which may fail."""
        for pending, request_states in zip(late, states, strict=True):
            slot = pending.request.slot
            self.draft_kv.num_valid[slot] = self.draft_kv.num_valid.get(slot, 0) + len(pending.tokens)
            self._last_states[slot] = request_states[-1].clone()
            del self._pending[slot]

    def _run_pass(self, spans: Sequence[Span], states: Tensor, page_size: int) -> Tensor:
        """Run the context encoder over spans of T tokens with states [T, H]. Returns its outputs [T, H]."""
        return self.lm.forward(ForwardBatch.build(spans, [], page_size, self.context.device), states)[1]


def _collect_last_tokens(builder: TreeBuilder, node: int) -> list[int]:
    """Return a node's token and the two before it, oldest first; missing ones repeat the sequence's first token."""
    tokens: list[int] = []
    while node and len(tokens) < TRIGRAM_TOKENS:
        tokens.append(builder.tokens[node - 1])
        node = builder.parents[node - 1]
    position = builder.request.num_tokens - 1
    while len(tokens) < TRIGRAM_TOKENS:
        tokens.append(builder.request.get_token(max(position, 0)))
        position -= 1
    return tokens[::-1]
