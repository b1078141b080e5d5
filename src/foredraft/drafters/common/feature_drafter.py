"""Drafter for networks with a KV cache of (token, feature) pairs. EAGLE and EAGLE-3 predict the next feature from them.

Feature t is the target's hidden state at token t. Pair t is token t + 1 with feature t. Position t of the draft KV, the
network's KV cache, holds the keys and values of pair t. The network's output at pair t approximates feature t + 1, and
gives logits for token t + 2.

- `observe` records the pairs of committed tokens as pending, so a step without a draft costs almost nothing. It
  computes the pending pairs of a request only if there are MAX_PENDING_PAIRS of them, as in a long prompt.
- `propose` computes the pending pairs in one forward pass of the network. Their entries replace those of the previous
  draft, which are not valid. The output at the last pair gives the logits for the children of the root. Then the draft
  grows level by level: the pair of a draft node has the network's output at its parent in place of the feature.

After a prefix-cache hit, the pairs on the shared pages are valid. Pair t depends on token t + 1, so the prefix cache
shares a page with draft KV only if the token after the page is equal too.

Two subclasses record pending pairs in the same way. Heads, not this network, compute the logits of their drafts:

- `Chimera`: pair t is token t with feature t, so it does not depend on token t + 1. The root's feature is not computed
  yet; the output of the trigram encoder takes its place. One pass computes the pending pairs and this one.
- `HydraPrefixDrafter` (Hydra++): the network reads the features alone. Its output at the last pair is the input of the
  heads.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from foredraft.drafters.common.chain_loop import finish_chains, is_native_chain, plan_chain
from foredraft.drafters.common.device_loop.loop import make_draft_loop
from foredraft.drafters.common.device_loop.recording import LevelOutput
from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.level_loop import LevelStates, grow_levels, start_builder
from foredraft.drafters.common.mismatch_warning import MismatchDetector
from foredraft.drafters.common.tree_builder import NodeLogits, TreeSpec
from foredraft.drafters.draft import to_token_tree
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.spec import DrafterSpec
from foredraft.kernels.cpu.library import load_library
from foredraft.kv.draft_kv import DraftKV
from foredraft.kv.pool import KVPool
from foredraft.kv.weak import bind_weakly
from foredraft.models.feature_lm import FeatureLM, FeatureNetwork, NativeFeatureNetwork
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.native.draft_chain import NativeChains
from foredraft.models.native.draft_layers import NativeDraftLayers
from foredraft.path_features import FeatureRows, read_all
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

# Bounds on the memory of pending pairs. `observe` computes those of a request that has MAX_PENDING_PAIRS of them. At
# most MAX_REFERENCES steps of a request are references to the target's hidden states, which keep the rows of other
# requests in memory too (`PathFeatures.keep`); older rows are copies.
MAX_PENDING_PAIRS = 256
MAX_REFERENCES = 16


@dataclass(frozen=True)
class RootOutput:
    """Output of the network at a request's last committed pair. The draft starts from it."""

    logits: Tensor  # [1, W] for the children of the root; W columns of the drafter's vocabulary
    feature: Tensor  # [1, H] predicted feature at the root; H is the width of the network


@dataclass
class PendingPairs:
    """Committed pairs of one request that are not in the draft KV yet. They follow its valid entries."""

    request: Request
    page_size: int  # tokens per KV page
    tokens: list[int] = field(default_factory=list)  # tokens of all pending pairs
    features: list[FeatureRows] = field(default_factory=list)  # features of all pending pairs, step by step
    num_joined: int = 0  # leading entries of `features` that are copies

    def add(self, tokens: Sequence[int], features: FeatureRows) -> None:
        """Append the pairs of n tokens and n rows of features."""
        self.features.append(features)
        self.tokens += tokens
        if len(self.features) - self.num_joined >= MAX_REFERENCES:
            self._join()

    def _join(self) -> None:
        """Copy the rows that are references, so that they keep no other rows in memory."""
        rows = read_all(self.features[self.num_joined :])
        self.features[self.num_joined :] = [FeatureRows(rows, range(len(rows)))]
        self.num_joined += 1


class FeatureDrafter:
    """Drafter around a FeatureLM. It drafts a chain or a tree, level by level, for all requests of a batch at once.

    Args:
        lm: the network with its own KV pool, which is addressed by the page ids of the target.
        hidden_layers: layer boundaries of the target whose hidden states form the features, as in `DrafterSpec`.
        tree_spec: limits and shape of the draft.
        context: target, device and vocabulary.
        token_ids: [W] token id of each column of the network's logits; None = column i is token i of the target.
    """

    def __init__(
        self,
        lm: FeatureLM,
        hidden_layers: tuple[int, ...],
        tree_spec: TreeSpec,
        context: DrafterContext,
        token_ids: Tensor | None = None,
    ) -> None:
        self.lm = lm
        self.tree_spec = tree_spec
        self.context = context
        self.token_ids = token_ids
        self.draft_kv = DraftKV(
            lm.pool,
            _compute_bytes_per_token(lm),
            token_lookahead=1,  # entry t depends on token t + 1
            is_rebuildable_from_tokens=False,
            flush=bind_weakly(self.flush),
        )
        self.loop = make_draft_loop(
            FeatureLoopNetwork(lm, context.vocab_size, token_ids), tree_spec, context.device, lm.pool
        )
        self._chains = _make_chains(lm, context.vocab_size, token_ids)
        self._root_outputs: dict[int, RootOutput] = {}  # by slot; absent until a pass has computed pairs of the request
        self._pending: dict[int, PendingPairs] = {}  # by slot
        self.mismatch_detector = MismatchDetector(context)  # warns if the head was trained for another target
        self.spec = DrafterSpec(
            tree_spec.max_nodes,
            hidden_layers,
            missed_states="end",  # later pairs need all earlier ones
            draft_kv=self.draft_kv,
            is_chain=tree_spec.is_chain,
            silence_mismatch=self.mismatch_detector.silence,
            is_native=lm.fused is not None,
        )

    def propose(self, batch: Batch) -> TokenTree:
        drafts = {b: draft for b in batch.find_drafting() if (draft := self._start_draft(batch, b)) is not None}
        if drafts:
            self._grow_drafts(list(drafts.values()), batch.page_size)
        tree = to_token_tree(batch, {b: draft.to_draft() for b, draft in drafts.items()})
        self.mismatch_detector.record_proposal(batch, tree)
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Record the new committed pairs of every request as pending.

        A request is left out if pairs before the new ones are missing: neither observed nor hit in the prefix cache.
        """
        self.mismatch_detector.record_commit(batch, commit)
        if commit.path_features is None:
            return
        full_slots: list[int] = []
        for b, request in enumerate(batch.requests):
            tokens, slot = commit.tokens[b], request.slot
            # Token i of `tokens` and feature i of the step form pair num_computed + i.
            if tokens and request.num_computed == self._count_observed_pairs(slot):
                pending = self._pending.get(slot)
                if pending is None:
                    pending = self._pending[slot] = PendingPairs(request, batch.page_size)
                pending.add(self._select_pair_tokens(request, tokens), commit.path_features.keep(b))
                if len(pending.tokens) >= MAX_PENDING_PAIRS:
                    full_slots.append(slot)
        self._compute_pending(full_slots)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._root_outputs.pop(slot, None)
            self._pending.pop(slot, None)
            self.draft_kv.num_valid.pop(slot, None)

    @torch.inference_mode()
    def flush(self, slots: Sequence[int]) -> None:
        """Compute the pending pairs of these slots if they complete a KV page; the prefix cache shares only full pages.

        Called through `DraftKV.flush` before the prefix cache looks at the draft KV of these slots.
        """
        self._compute_pending([slot for slot in slots if self._completes_page(slot)])

    def _completes_page(self, slot: int) -> bool:
        pending, valid = self._pending.get(slot), self.draft_kv.num_valid.get(slot, 0)
        return pending is not None and valid % pending.page_size + len(pending.tokens) >= pending.page_size

    def _count_observed_pairs(self, slot: int) -> int:
        """Count the leading pairs of a request that are valid in the draft KV, or pending."""
        pending = self._pending.get(slot)
        return self.draft_kv.num_valid.get(slot, 0) + (0 if pending is None else len(pending.tokens))

    def _select_pair_tokens(self, request: Request, following: Sequence[int]) -> Sequence[int]:
        """Return the token of each new pair. Chimera overrides it.

        Args:
            request: request before the new tokens are appended.
            following: token after each node of the committed path. Here pair t has token t + 1, so it is the result.
        """
        return following

    def _has_root_output(self, slot: int) -> bool:
        """Return whether the output at the last pair exists, or will exist once the pending pairs are computed.

        False if every pair came from the prefix cache, which has their KV but no outputs.
        """
        return slot in self._root_outputs or slot in self._pending

    def _start_draft(self, batch: Batch, b: int) -> GrowingKVDraft | None:
        """Start the draft of request b, which has only its root at first. Returns None if the request cannot draft."""
        request = batch.requests[b]
        num_pairs = self._count_observed_pairs(request.slot)
        # n committed tokens form n - 1 pairs.
        if not self._has_root_output(request.slot) or num_pairs != request.num_tokens - 1:
            return None
        builder = start_builder(self.tree_spec, batch, b, self.tree_spec.max_depth)
        # KV position of the pair whose token is the root, which is token num_tokens - 1. Pair t holds token
        # t + token_lookahead: the root's pair is the last observed one here, and the next one in Chimera.
        root_pair = request.num_tokens - 1 - self.draft_kv.token_lookahead
        return None if builder is None else GrowingKVDraft(builder, start=root_pair)

    def _grow_drafts(self, drafts: list[GrowingKVDraft], page_size: int) -> None:
        """Compute the pending pairs of the drafting requests, then grow all drafts to their end."""
        self._compute_pending(draft.builder.request.slot for draft in drafts)
        self._build_trees(drafts, page_size)

    def _compute_pending(self, slots: Iterable[int]) -> None:
        """Compute all pending pairs of these slots in one forward pass."""
        pending_by_slot = {slot: self._pending[slot] for slot in slots if slot in self._pending}
        if not pending_by_slot:
            return
        last_rows, total, spans, features = [], 0, [], []  # last_rows: packed row of each slot's last pair
        for slot, pending in pending_by_slot.items():
            total += len(pending.tokens)
            last_rows.append(total - 1)
            start, tokens = self.draft_kv.num_valid.get(slot, 0), pending.tokens
            source = pending.request.spec.source
            spans.append(Span(pending.request.pages, start, tokens, range(len(tokens)), source=source))
            features += pending.features
        page_size = next(iter(pending_by_slot.values())).page_size
        forward_batch = ForwardBatch.build(spans, last_rows, page_size, self.context.device)
        # logits [slots, W] at the last rows, next_features [T, H] at all rows
        logits, next_features = self.lm.forward(forward_batch, self.lm.project_features(read_all(features)))
        for i, (span, slot, row) in enumerate(zip(spans, pending_by_slot, last_rows, strict=True)):
            self._root_outputs[slot] = RootOutput(logits[i : i + 1], next_features[row : row + 1])
            self.draft_kv.num_valid[slot] = span.num_keys  # valid entries before this pass, and those of this pass
            del self._pending[slot]

    def _build_trees(self, drafts: list[GrowingKVDraft], page_size: int) -> None:
        """Grow all drafts from the outputs at their roots."""
        roots = [self._root_outputs[draft.builder.request.slot] for draft in drafts]
        logits, features = (
            _concat_rows(rows) for rows in ([root.logits for root in roots], [root.feature for root in roots])
        )
        if self._draft_chains(drafts, logits, features, page_size):
            return
        if self.loop is None or not self.loop.grow(drafts, (logits, features), page_size):
            self._grow_trees(drafts, logits, features, page_size)

    def _draft_chains(self, drafts: list[GrowingKVDraft], logits: Tensor, features: Tensor, page_size: int) -> bool:
        """Draft chains in one native call. Returns False if it cannot."""
        if self._chains is None or not all(is_native_chain(draft.builder) for draft in drafts):
            return False
        plans = [plan_chain(draft) for draft in drafts]
        found = self._chains.continue_drafts(plans, self.lm.pool, page_size, logits, features)
        if found is not None:
            finish_chains(drafts, plans, found)
        return found is not None

    def _grow_trees(
        self, drafts: list[GrowingKVDraft], root_logits: Tensor, root_features: Tensor, page_size: int
    ) -> None:
        """Grow all drafts level by level. Each level after the first takes one forward pass over the level above it."""
        # The features of the newest level, one row per node; the next level reads the rows of its parents.
        features = LevelStates(root_features)
        features.start(drafts)
        grow_levels(drafts, self._make_node_logits(root_logits), partial(self._compute_level, features, page_size))

    def _compute_level(self, features: LevelStates, page_size: int, drafts: list[GrowingKVDraft]) -> NodeLogits:
        """Compute the frontiers; the pair of a node is its token with the output at its parent."""
        spans = [draft.build_span() for draft in drafts]
        num_rows = sum(len(span.tokens) for span in spans)
        forward_batch = ForwardBatch.build(spans, range(num_rows), page_size, self.context.device)
        logits, outputs = self.lm.forward(forward_batch, features.select_parents(drafts))
        features.record(drafts, outputs)
        return self._make_node_logits(logits)

    def _make_node_logits(self, logits: Tensor) -> NodeLogits:
        return NodeLogits(logits, self.context.vocab_size, self.token_ids)


@dataclass(frozen=True)
class FeatureLoopNetwork:
    """FeatureLM in a recorded loop. Roots are their logits and features."""

    lm: FeatureLM
    vocab_size: int
    token_ids: Tensor | None

    def compute_root(self, roots: Sequence[Tensor], tokens: Tensor) -> LevelOutput:
        logits, features = roots
        return LevelOutput(NodeLogits(logits, self.vocab_size, self.token_ids), features)

    def compute_level(
        self, level: int, tokens: Tensor, states: Tensor | None, batch: ForwardBatch | None
    ) -> LevelOutput:
        assert states is not None
        assert batch is not None
        logits, features = self.lm.forward(batch, states)
        return LevelOutput(NodeLogits(logits, self.vocab_size, self.token_ids), features)


N = TypeVar("N", bound=FeatureNetwork)


def make_feature_lm(
    network: N, make_native: Callable[[N], NativeFeatureNetwork | None], context: DrafterContext
) -> FeatureLM:
    """Wrap a network in a FeatureLM with its own KV pool.

    Args:
        network: draft network; its `shape` has a `block` with the layer sizes.
        make_native: converts the network to native code, or returns None if it cannot. Used on CPUs with
            `context.fused`.
        context: device, dtype, and `fused` (native code is allowed).
    """
    # The pool is native even if the layers are not: native attention kernels then read it.
    is_native = context.fused and context.device.type == "cpu" and load_library() is not None
    shape: Any = network.shape  # type: ignore[attr-defined]
    native = make_native(network) if is_native else None
    pool = KVPool.for_device(context.device, is_native)
    return FeatureLM(network, context.dtype, pool, native, shape.block.sliding_windows)


def _make_chains(lm: FeatureLM, vocab_size: int, token_ids: Tensor | None) -> NativeChains | None:
    """Return the native loop of a network; None if its passes are not native calls."""
    if not isinstance(lm.fused, NativeDraftLayers):
        return None
    ids = None if token_ids is None else token_ids.to(torch.int32).contiguous()
    chains = NativeChains(lm.fused.decoder, vocab_size, lm.fused.feature_layer, ids)
    return chains if chains.reads_own_tokens else None


def _compute_bytes_per_token(lm: FeatureLM) -> int:
    """Return the bytes of keys and values per token in all layers of the network."""
    shape: Any = lm.network.shape  # type: ignore[attr-defined]
    return int(2 * shape.num_layers * shape.block.kv_heads * shape.block.head_dim * lm.dtype.itemsize)


def _concat_rows(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
