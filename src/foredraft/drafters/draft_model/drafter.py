"""Drafter with an independent, smaller model.

It drafts a chain (2211.17192), or a tree of likeliest or sampled tokens (SpecInfer, 2305.09781; EAGLE-2, 2406.16858).

The model has its own KV cache on the target's page ids. Its valid part is a prefix of the committed tokens; missing
tokens (the prompt, the last token of a draft, steps without drafts) are computed before the next draft. Writing to
shared pages is safe: entry t depends only on the tokens up to t, which are equal for all requests on the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from foredraft.drafters.common.chain_loop import finish_chains, is_native_chain, plan_chain
from foredraft.drafters.common.device_loop.loop import make_draft_loop
from foredraft.drafters.common.device_loop.recording import LevelOutput
from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.level_loop import grow_levels, start_builder
from foredraft.drafters.common.mismatch_warning import MismatchDetector
from foredraft.drafters.common.tree_builder import NodeLogits, TreeOptions
from foredraft.drafters.draft import to_token_tree
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.spec import DrafterSpec
from foredraft.kv.draft_kv import DraftKV
from foredraft.kv.pool import compact_accepted
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import LM, HFModel
from foredraft.models.native.draft_chain import NativeChains
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

PREFILL_CHUNK_TOKENS = 512  # maximum prompt tokens per forward pass


@dataclass(frozen=True)
class Config(TreeOptions):
    """Options: the tree options, and these.

    Args:
        quantization: "int8" or "int4" weights of the draft model; None = as stored.
        dtype: dtype of the draft model; "auto" = as stored, None = that of the target.
        device: device of the draft model, which must be that of the target; None = that of the target.
        max_model_len: longest sequence that is drafted for, in tokens; None = the context of the draft model.
        vocab: translation if the draft model has another vocabulary (see `cross_vocab/select.py`).
        draft_kv_tokens: capacity of the draft KV cache with another vocabulary, in tokens of all requests; None = at
            most a quarter of the free memory, 10 % of a GPU's.
        parallel: whether one pass drafts all tokens (PARD, `parallel.py`); None = if the model's configuration has
            `pard_token` or `ptd_token_id`, and the vocabulary of the target.
    """

    quantization: str | None = None
    dtype: str | None = None
    device: str | None = None
    max_model_len: int | None = None
    vocab: str = "auto"
    draft_kv_tokens: int | None = None
    parallel: bool | None = None


class DraftModel:
    """Drafter with its own language model: one forward pass per level for all requests of a batch.

    Args:
        lm: draft model with the target's vocabulary.
        context: target, device and draft length.
        options: tree options; None = a chain.
    """

    vocab_option = "same"

    def __init__(self, lm: LM, context: DrafterContext, options: TreeOptions | None = None) -> None:
        self.lm = lm
        self.context = context
        self.tree_spec = (options or TreeOptions()).to_tree_spec(context.num_speculative_tokens)
        measure = getattr(lm, "bytes_per_token", None)  # absent if the LM has no KV cache
        self.draft_kv = DraftKV(lm.pool, 0 if measure is None else measure())
        network = DraftModelLoopNetwork(lm, context.vocab_size)
        self.loop = make_draft_loop(network, self.tree_spec, context.device, lm.pool)
        self._chains = _make_chains(lm, context.vocab_size)
        self._last_drafts: dict[int, GrowingKVDraft] = {}  # slot -> draft of this step
        self.mismatch_detector = MismatchDetector(context)
        self.spec = DrafterSpec(
            self.tree_spec.max_nodes,
            draft_kv=self.draft_kv,
            reads_plain_commits=False,
            is_chain=self.tree_spec.is_chain,
            silence_mismatch=self.mismatch_detector.silence,
            is_native=lm.pool.is_native,
        )

    @property
    def num_valid(self) -> dict[int, int]:
        """Number of leading committed tokens with valid draft KV, by slot."""
        return self.draft_kv.num_valid

    def propose(self, batch: Batch) -> TokenTree:
        self._last_drafts.clear()
        drafts = {b: draft for b in batch.find_drafting() if (draft := self._start_draft(batch, b)) is not None}
        if drafts:
            self._build_trees(list(drafts.values()), batch.page_size)
        tree = to_token_tree(batch, {b: draft.to_draft() for b, draft in drafts.items()})
        self.mismatch_detector.record_proposal(batch, tree)
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Keep the draft KV of accepted nodes: move it behind the committed tokens, and drop the rest."""
        self.mismatch_detector.record_commit(batch, commit)
        rows = [b for b, r in enumerate(batch.requests) if r.slot in self._last_drafts]
        starts, paths = [], []
        for b in rows:
            request, offset = batch.requests[b], batch.num_new_tokens[b] - 1
            draft = self._last_drafts[request.slot]
            verified = draft.builder.verified_nodes
            accepted = [node - offset for node in commit.paths[b][offset:]]
            # a larger index is a node of another member, if an ensemble merged this draft with others
            nodes = [verified[node] for node in accepted if node < len(verified)]
            path = [draft.offsets[node] for node in nodes if node in draft.offsets]  # leaves may have no KV
            starts.append(request.num_tokens - 1)
            paths.append(path)
            self.num_valid[request.slot] = request.num_tokens - 1 + len(path)
        pages = [batch.requests[b].pages for b in rows]
        compact_accepted(self.lm.pool, paths, starts, pages, batch.page_size, self.context.device)
        self._last_drafts.clear()  # the next step may call `observe` without `propose`

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.num_valid.pop(slot, None)
            self._last_drafts.pop(slot, None)

    def _start_draft(self, batch: Batch, b: int) -> GrowingKVDraft | None:
        request = batch.requests[b]
        builder = start_builder(self.tree_spec, batch, b, self.lm.context_length - request.num_tokens + 1)
        return None if builder is None else GrowingKVDraft(builder, start=request.num_tokens - 1)

    def _build_trees(self, drafts: list[GrowingKVDraft], page_size: int) -> None:
        requests = [draft.builder.request for draft in drafts]
        spans = self._prefill(requests, page_size)
        is_drafted = self._draft_chains(drafts, spans, page_size)
        logits = None if is_drafted else self._forward(spans, page_size, last_only=True)
        self._record_roots(drafts)
        if logits is not None and (self.loop is None or not self.loop.grow(drafts, (logits,), page_size)):
            self._grow_trees(drafts, logits, page_size)

    def _record_roots(self, drafts: Sequence[GrowingKVDraft]) -> None:
        """Record that all committed tokens have KV; after the forward pass, which may fail."""
        for draft in drafts:
            request = draft.builder.request
            self.num_valid[request.slot] = request.num_tokens
            self._last_drafts[request.slot] = draft

    def _draft_chains(self, drafts: list[GrowingKVDraft], spans: Sequence[Span], page_size: int) -> bool:
        """Draft chains in one native call, with the pass over the newest tokens. Returns False if it cannot."""
        if self._chains is None or not all(is_native_chain(draft.builder) for draft in drafts):
            return False
        plans = [plan_chain(draft) for draft in drafts]
        first = ForwardBatch.from_spans(spans, page_size, self.context.device, last_only=True)
        found = self._chains.draft(plans, self.lm.pool, first)
        if found is not None:
            finish_chains(drafts, plans, found)
        return found is not None

    def _grow_trees(self, drafts: list[GrowingKVDraft], logits: Tensor, page_size: int) -> None:
        """Grow all drafts level by level from the logits after their roots."""
        grow_levels(drafts, NodeLogits(logits, self.context.vocab_size), partial(self._compute_level, page_size))

    def _compute_level(self, page_size: int, drafts: list[GrowingKVDraft]) -> NodeLogits:
        logits = self._forward([draft.build_span() for draft in drafts], page_size, last_only=False)
        return NodeLogits(logits, self.context.vocab_size)

    def _prefill(self, requests: Sequence[Request], page_size: int) -> list[Span]:
        """Compute the draft KV of missing committed tokens, except for the newest. Returns the spans of those."""
        spans = []
        for request in requests:
            start = self.lm.pool.find_valid_start(request.pages, self.num_valid.get(request.slot, 0), page_size)
            while request.num_tokens - start > PREFILL_CHUNK_TOKENS:
                self._forward(
                    [_build_chain_span(request, start, start + PREFILL_CHUNK_TOKENS)], page_size, last_only=True
                )
                start += PREFILL_CHUNK_TOKENS
            spans.append(_build_chain_span(request, start, request.num_tokens))
        return spans

    def _forward(self, spans: Sequence[Span], page_size: int, last_only: bool) -> Tensor:
        logits, _ = self.lm.forward(ForwardBatch.from_spans(spans, page_size, self.context.device, last_only))
        return logits[:, : self.context.vocab_size]  # without columns that pad the draft's vocabulary


@dataclass(frozen=True)
class DraftModelLoopNetwork:
    """Draft model in a recorded loop. Roots are their logits; a row reads no state of its parent but KV."""

    lm: LM
    vocab_size: int

    def compute_root(self, roots: Sequence[Tensor], tokens: Tensor) -> LevelOutput:
        return LevelOutput(NodeLogits(roots[0], self.vocab_size))

    def compute_level(
        self, level: int, tokens: Tensor, states: Tensor | None, batch: ForwardBatch | None
    ) -> LevelOutput:
        assert batch is not None
        logits, _ = self.lm.forward(batch)
        return LevelOutput(NodeLogits(logits[:, : self.vocab_size], self.vocab_size))


def _make_chains(lm: LM, vocab_size: int) -> NativeChains | None:
    """Return the native loop of a draft model; None if its passes are not native calls, or have recurrent states."""
    decoder = lm.fused if isinstance(lm, HFModel) else None
    chains = None if decoder is None or decoder.state_shapes else NativeChains(decoder, vocab_size)
    return chains if chains is not None and chains.reads_own_tokens else None


def _build_chain_span(request: Request, start: int, stop: int) -> Span:
    tokens = request.get_tokens(start, stop)
    source, num_settled = request.spec.source, len(tokens) - 1
    return Span(request.pages, start, tokens, range(len(tokens)), source=source, num_settled=num_settled)
