"""A draft model whose vocabulary is not the target's (2502.05202): what the two ways to draft with one share.

It reads the committed text in its own tokens (`Reading`), of which there are more or fewer than the target's; so its
KV lies on pages of its own. A request that these have no room for is not drafted for.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.drafters.base import Context, Draft, plant
from foredraft.drafters.branch import Branch
from foredraft.drafters.growth import Plan, TreeOptions
from foredraft.drafters.intersection import Pair
from foredraft.drafters.readings import Reading
from foredraft.kv.blocks import OutOfPagesError, PageAllocator
from foredraft.kv.sizing import MemoryLimits
from foredraft.models.lm import LM
from foredraft.models.window import Span, Window
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

PAGE = 16  # tokens of a page
CHUNK = 512  # tokens of a prompt read in one pass


@dataclass(eq=False)
class Held:
    """What is kept of a request while it runs."""

    request: Request
    reading: Reading
    plan: Plan  # of this step
    pages: list[int] = field(default_factory=list)
    branch: Branch | None = None  # of this step, where its KV is to be kept

    @property
    def length(self) -> int:
        """Draft tokens of the committed text."""
        return len(self.reading.tokens)

    def span(self, start: int, stop: int) -> Span:
        tokens = self.reading.tokens[start:stop]
        return Span(self.pages, start, tokens, range(len(tokens)))


class Translated(ABC):
    """Drafts in another vocabulary, level by level, all requests of a batch in one pass per level."""

    taps: tuple[int, ...] = ()
    vocab: str  # how it does: the word of the option

    def __init__(
        self,
        lm: LM,
        context: Context,
        pair: Pair,
        options: TreeOptions | None = None,
        kv_tokens: int | None = None,
    ) -> None:
        """kv_tokens: what its KV memory holds of all requests together; None = as `MemoryLimits` sizes a pool."""
        self.lm = lm
        self.context = context
        self.pair = pair
        self.plan = (options or TreeOptions()).plan(context.num_tokens)
        measure = getattr(lm, "bytes_per_token", None)  # an LM without keys and values takes none
        limits = MemoryLimits(kv_tokens=kv_tokens, page_size=PAGE)
        num_pages = limits.num_pages(lm.context_length, max(1, measure() if measure else 1), context.device)
        lm.pool.capacity = num_pages * PAGE
        self.allocator = PageAllocator(num_pages, PAGE)
        self._held: dict[int, Held] = {}  # by slot

    @property
    def num_nodes(self) -> int:
        return self.plan.nodes

    @abstractmethod
    def draft(self, held: Sequence[Held]) -> list[Draft]:
        """One for each, in the target's tokens. Their text is read, and they have pages for what they may draft."""

    @abstractmethod
    def num_own(self, plan: Plan) -> int:
        """The most draft tokens that are written for a plan."""

    def propose(self, batch: Batch) -> TokenTree:
        ready = {b: held for b in batch.drafting() if (held := self._ready(batch, b)) is not None}
        drafts = self.draft(list(ready.values())) if ready else []
        return plant(batch, dict(zip(ready, drafts, strict=True)))

    @abstractmethod
    def observe(self, batch: Batch, commit: Commit) -> None: ...

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            held = self._held.pop(slot, None)
            if held is not None:
                self.allocator.free(held.pages)

    def _ready(self, batch: Batch, b: int) -> Held | None:
        """The request with its text read and pages for its draft; None where it cannot be drafted for."""
        request = batch.requests[b]
        held = self._held.get(request.slot)
        if held is None:
            held = self._held[request.slot] = Held(request, Reading(self.pair), self.plan)
        reading = held.reading
        reading.extend(request.slice(reading.num_read, request.num_tokens))
        depth = min(request.room, self.lm.context_length - held.length + 1)
        held.plan = self.plan.cut(max(depth, 0), batch.budgets[b], request.verify == "block")
        if not held.length or held.plan.nodes < 1 or held.plan.depth < 1:
            return None
        try:
            self.allocator.grow(held.pages, held.length + self.num_own(held.plan))
        except OutOfPagesError:
            return None
        return held

    def read_in(self, held: Sequence[Held]) -> Tensor:
        """Bring the KV of all up to their last committed token; logits [R, W] after it."""
        starts = [min(h.reading.num_valid, h.length - 1) for h in held]
        spans = []
        for h, start in zip(held, starts, strict=True):
            while h.length - start > CHUNK:
                self.forward([h.span(start, start + CHUNK)], last_only=True)
                start += CHUNK
                h.reading.num_valid = start
            spans.append(h.span(start, h.length))
        logits = self.forward(spans, last_only=True)
        for h in held:  # not before the pass: it may fail
            h.reading.num_valid = h.length
        return logits

    def forward(self, spans: Sequence[Span], last_only: bool) -> Tensor:
        return self.lm.forward(Window.after(spans, PAGE, self.context.device, last_only))[0]
