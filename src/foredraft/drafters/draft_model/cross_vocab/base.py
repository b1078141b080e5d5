"""Shared code of the drafters whose draft model has another vocabulary than the target (SLEM, TLI).

The draft model reads the committed tokens as tokens of its own (`IncrementalRetokenizer`), so the numbers of tokens
differ and its KV cache has its own pages. A request that does not fit these pages is not drafted for.

Reference: 2502.05202.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.mismatch_warning import MismatchDetector
from foredraft.drafters.common.tree_builder import TreeOptions, TreeSpec
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.draft_model.cross_vocab.retokenizer import IncrementalRetokenizer
from foredraft.drafters.draft_model.cross_vocab.vocab_map import VocabMap
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.spec import DrafterSpec
from foredraft.kv.allocator import OutOfPagesError, PageAllocator
from foredraft.kv.sizing import MemoryLimits
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.hf import LM
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

PAGE_SIZE = 16  # tokens per page
PREFILL_CHUNK_TOKENS = 512  # prompt tokens per forward pass
# Share of the default KV memory. On a GPU the default is nearly all of the free memory, and the target takes its own.
GPU_DRAFT_KV_SHARE = 0.125


@dataclass(eq=False)
class CrossVocabState:
    """State of a running request."""

    request: Request
    retokenizer: IncrementalRetokenizer
    tree_spec: TreeSpec  # shape of this step's draft
    draft_stream: int = 0  # of this step's batch
    pages: list[int] = field(default_factory=list)
    draft: GrowingKVDraft | None = None  # draft of this step, until accepted KV is compacted

    @property
    def num_tokens(self) -> int:
        """Length of the sequence in tokens of the draft model."""
        return len(self.retokenizer.tokens)

    def build_span(self, start: int, stop: int) -> Span:
        tokens = self.retokenizer.tokens[start:stop]
        return Span(self.pages, start, tokens, range(len(tokens)), num_settled=len(tokens) - 1)


class CrossVocabDrafter(ABC):
    """Drafter in another vocabulary; each level of all drafts of a batch takes one forward pass.

    Args:
        lm: the draft model.
        context: target, options and environment.
        vocab_map: both vocabularies.
        options: shape of the draft; None = a chain.
        kv_tokens: capacity of its KV pool in tokens, over all requests; None = sized by `MemoryLimits`.
    """

    vocab_option: str  # value of the option `vocab`

    def __init__(
        self,
        lm: LM,
        context: DrafterContext,
        vocab_map: VocabMap,
        options: TreeOptions | None = None,
        kv_tokens: int | None = None,
    ) -> None:
        self.lm = lm
        self.context = context
        self.vocab_map = vocab_map
        self.tree_spec = (options or TreeOptions()).to_tree_spec(context.num_speculative_tokens)
        get_bytes_per_token = getattr(lm, "bytes_per_token", None)  # an LM without a KV cache has none
        share = GPU_DRAFT_KV_SHARE if context.device.type == "cuda" else 1.0
        limits = MemoryLimits(kv_tokens=kv_tokens, page_size=PAGE_SIZE, kv_share=share)
        num_pages = limits.num_pages(
            lm.context_length, max(1, get_bytes_per_token() if get_bytes_per_token else 1), context.device
        )
        lm.pool.capacity = num_pages * PAGE_SIZE
        self.allocator = PageAllocator(num_pages, PAGE_SIZE)
        if lm.pool.state_pools:
            self.allocator.on_free = lm.pool.drop_states
        self.mismatch_detector = MismatchDetector(context)
        self.spec = DrafterSpec(
            self.tree_spec.max_nodes,
            silence_mismatch=self.mismatch_detector.silence,
            vocabulary=self.vocab_option,
            is_native=lm.pool.is_native,
        )
        self._states: dict[int, CrossVocabState] = {}  # by slot

    @abstractmethod
    def draft_batch(self, states: Sequence[CrossVocabState]) -> list[Draft]:
        """Draft for each state, in target tokens. The states are up to date and have pages for their drafts."""

    @abstractmethod
    def count_written_tokens(self, tree_spec: TreeSpec) -> int:
        """Return the maximum number of draft-model tokens that a draft of this shape writes to the KV cache."""

    def propose(self, batch: Batch) -> TokenTree:
        ready = {b: state for b in batch.find_drafting() if (state := self._prepare_state(batch, b)) is not None}
        drafts = self.draft_batch(list(ready.values())) if ready else []
        tree = to_token_tree(batch, dict(zip(ready, drafts, strict=True)))
        self.mismatch_detector.record_proposal(batch, tree)
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.mismatch_detector.record_commit(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            state = self._states.pop(slot, None)
            if state is not None:
                self.allocator.free(state.pages)

    def _prepare_state(self, batch: Batch, b: int) -> CrossVocabState | None:
        """Update a request's state and allocate pages for its draft; None if it cannot draft."""
        request = batch.requests[b]
        state = self._states.get(request.slot)
        if state is None:
            state = self._states[request.slot] = CrossVocabState(
                request, IncrementalRetokenizer(self.vocab_map), self.tree_spec
            )
        retokenizer = state.retokenizer
        retokenizer.extend(request.get_tokens(retokenizer.num_read, request.num_tokens))
        depth = min(request.max_draft_depth, self.lm.context_length - state.num_tokens + 1)
        is_chain = not request.spec.rule.takes_trees
        state.tree_spec = self.tree_spec.restrict(max(depth, 0), batch.granted_nodes[b], is_chain)
        state.draft_stream = batch.draft_stream
        if not state.num_tokens or state.tree_spec.max_nodes < 1 or state.tree_spec.max_depth < 1:
            return None
        try:
            self.allocator.grow(state.pages, state.num_tokens + self.count_written_tokens(state.tree_spec))
        except OutOfPagesError:
            return None
        return state

    def prefill(self, states: Sequence[CrossVocabState]) -> Tensor:
        """Compute KV up to the last committed token of each state.

        Returns:
            Logits [R, W] after these tokens; W is the vocabulary of the draft model.
        """
        lengths = [min(state.retokenizer.num_valid, state.num_tokens - 1) for state in states]
        starts = [
            self.lm.pool.find_valid_start(state.pages, length, PAGE_SIZE)
            for state, length in zip(states, lengths, strict=True)
        ]
        spans = []
        for state, start in zip(states, starts, strict=True):
            while state.num_tokens - start > PREFILL_CHUNK_TOKENS:
                self.forward([state.build_span(start, start + PREFILL_CHUNK_TOKENS)], last_only=True)
                start += PREFILL_CHUNK_TOKENS
                state.retokenizer.num_valid = start
            spans.append(state.build_span(start, state.num_tokens))
        logits = self.forward(spans, last_only=True)
        for state in states:  # only after the pass, which may fail
            state.retokenizer.num_valid = state.num_tokens
        return logits

    def forward(self, spans: Sequence[Span], last_only: bool) -> Tensor:
        return self.lm.forward(ForwardBatch.from_spans(spans, PAGE_SIZE, self.context.device, last_only))[0]
