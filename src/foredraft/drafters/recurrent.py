"""Drafting with a layer over the target's states that takes its own output for the next state: EAGLE and its like.

The layer reads pairs: token t + 1 with feature t, kept at position t of its memory. Before it drafts, the pairs that
survived the target's passes are read with true features, in one go, so that what drafting wrote is overwritten; the
last row gives the laws below the root. Below it every node reads its parent's output in place of the feature.

Pairs are put off until someone drafts, so that a stretch without drafts costs next to nothing and leaves the memory as
it would be. Of a text that begins with pages of another, the pairs on these are right already: the prefix cache gives
it only pages whose last pair was made with the token that follows here too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from foredraft.drafters.base import Context, plant
from foredraft.drafters.branch import Branch
from foredraft.drafters.fit import Fit
from foredraft.drafters.growth import Growth, Plan, Scores, extend
from foredraft.kernels.cpu.library import library
from foredraft.kv.memory import DraftMemory
from foredraft.kv.pool import KVPool
from foredraft.kv.weak import weakly
from foredraft.models.feature_lm import FeatureLM, FeatureNetwork, NativeFeatures
from foredraft.models.window import Span, Window
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

PENDING = 256  # pairs of a request that may be put off: what is kept of the target's states is bounded


@dataclass(frozen=True)
class Root:
    """What the last true pair of a request said."""

    logits: Tensor  # [1, W] after it
    feature: Tensor  # [1, H] its output


@dataclass
class Pending:
    """Pairs of one request that are yet to be read, on top of those in memory."""

    request: Request
    page_size: int
    tokens: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)  # [n, F] each

    def add(self, tokens: Sequence[int], features: Tensor) -> None:
        """features: [P, F], of which the first len(tokens) are the request's."""
        mine = features[: len(tokens)]
        self.features.append(mine if len(features) <= 2 * len(tokens) else mine.clone())  # do not hold what is others'
        self.tokens += tokens


class FeatureDrafter:
    """The verbs, for any network that a FeatureLM runs. `ids` [W]: the tokens its logits stand for; None = all."""

    def __init__(
        self, lm: FeatureLM, taps: tuple[int, ...], plan: Plan, context: Context, ids: Tensor | None = None
    ) -> None:
        self.lm = lm
        self.taps = taps
        self.plan = plan
        self.context = context
        self.ids = ids
        self.memory = DraftMemory(lm.pool, _bytes_per_token(lm), 1, is_rereadable=False, settle=weakly(self.settle))
        self._roots: dict[int, Root] = {}  # by slot, of those whose memory was read and not only found
        self._pending: dict[int, Pending] = {}  # by slot
        self.fit = Fit(context)

    @property
    def num_nodes(self) -> int:
        return self.plan.nodes

    def propose(self, batch: Batch) -> TokenTree:
        branches = {b: branch for b in batch.drafting() if (branch := self._branch(batch, b)) is not None}
        if branches:
            self._draft(list(branches.values()), batch.page_size)
        return self.fit.proposed(batch, plant(batch, {b: branch.growth.draft() for b, branch in branches.items()}))

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Note the pairs that survived, of every request whose pairs before them are known."""
        self.fit.observed(batch, commit)
        if commit.features is None:
            return
        full: list[int] = []
        for b, request in enumerate(batch.requests):
            tokens, slot = commit.token_lists[b], request.slot
            if tokens and request.computed == self._known(slot):
                pending = self._pending.get(slot)
                if pending is None:
                    pending = self._pending[slot] = Pending(request, batch.page_size)
                pending.add(self._paired(request, tokens), commit.features[b])
                if len(pending.tokens) >= PENDING:
                    full.append(slot)
        self._read(full)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._roots.pop(slot, None)
            self._pending.pop(slot, None)
            self.memory.valid.pop(slot, None)

    @torch.inference_mode()
    def settle(self, slots: Sequence[int]) -> None:
        """Read what was put off of these slots, where it completes a page: the others are nobody's to share."""
        self._read([slot for slot in slots if self._completes_page(slot)])

    def _completes_page(self, slot: int) -> bool:
        pending, valid = self._pending.get(slot), self.memory.valid.get(slot, 0)
        return pending is not None and valid % pending.page_size + len(pending.tokens) >= pending.page_size

    def _known(self, slot: int) -> int:
        """Leading pairs of a request that were seen."""
        pending = self._pending.get(slot)
        return self.memory.valid.get(slot, 0) + (0 if pending is None else len(pending.tokens))

    def _paired(self, request: Request, following: Sequence[int]) -> Sequence[int]:
        """The tokens that stand with the features of the newest pass, of which `following` are those after them."""
        return following

    def _is_read(self, slot: int) -> bool:
        """Not where all was found: then nobody knows what the last entry said."""
        return slot in self._roots or slot in self._pending

    def _branch(self, batch: Batch, b: int) -> Branch | None:
        request = batch.requests[b]
        known = self._known(request.slot)
        if not self._is_read(request.slot) or known != request.num_tokens - 1:
            return None
        plan = self.plan.cut(request.room, batch.budgets[b], request.verify == "block")
        has_room = plan.nodes > 0 and plan.depth > 0
        return Branch(Growth(request, plan), known - self.memory.lookahead) if has_room else None

    def _draft(self, branches: list[Branch], page_size: int) -> None:
        self._read(branch.growth.request.slot for branch in branches)
        self._grow(branches, page_size)

    def _read(self, slots: Iterable[int]) -> None:
        """Bring the memory of these slots up to all that was seen."""
        late = {slot: self._pending[slot] for slot in slots if slot in self._pending}
        if not late:
            return
        ends, total, spans, features = [], 0, [], []
        for slot, pending in late.items():
            total += len(pending.tokens)
            ends.append(total - 1)
            start, tokens = self.memory.valid.get(slot, 0), pending.tokens
            source = pending.request.source
            spans.append(Span(pending.request.pages, start, tokens, range(len(tokens)), source=source))
            features += pending.features
        page_size = next(iter(late.values())).page_size
        window = Window.build(spans, ends, page_size, self.context.device)
        logits, following = self.lm.forward(window, self.lm.taken(_joined(features)))
        for i, (span, slot, end) in enumerate(zip(spans, late, ends, strict=True)):
            self._roots[slot] = Root(logits[i : i + 1], following[end : end + 1])
            self.memory.valid[slot] = span.length
            del self._pending[slot]

    def _grow(self, branches: list[Branch], page_size: int) -> None:
        roots = [self._roots[branch.growth.request.slot] for branch in branches]
        features, logits = _joined([r.feature for r in roots]), _joined([r.logits for r in roots])
        for row, branch in enumerate(branches):
            branch.rows = {0: row}
        while True:
            extend([branch.growth for branch in branches], Scores(logits, self.context.vocab_size, self.ids))
            branches = [branch for branch in branches if branch.growth.frontier]
            if not branches:
                return
            above = [row for branch in branches for row in branch.parents()]
            spans = [branch.span() for branch in branches]
            window = Window.build(spans, range(len(above)), page_size, self.context.device)
            is_same = above == list(range(len(features)))
            logits, features = self.lm.forward(window, features if is_same else features[above])
            row = 0
            for branch in branches:
                row = branch.passed(row)


N = TypeVar("N", bound=FeatureNetwork)


def feature_lm(network: N, fused: Callable[[N], NativeFeatures | None], context: Context) -> FeatureLM:
    """The network over memory of its own, as native code where `fused` makes it such."""
    is_native = context.fused and context.device.type == "cpu" and library() is not None
    shape: Any = network.shape  # type: ignore[attr-defined]
    native = fused(network) if is_native else None
    return FeatureLM(network, context.dtype, KVPool(is_native), native, shape.block.windows)


def _bytes_per_token(lm: FeatureLM) -> int:
    shape: Any = lm.network.shape  # type: ignore[attr-defined]
    return int(2 * shape.num_layers * shape.block.kv_heads * shape.block.head_dim * lm.dtype.itemsize)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
