"""Drafting with a layer over the target's states that takes its own output for the next state: EAGLE and its like.

The layer reads pairs: token t + 1 with feature t, kept at position t of its memory. After every target pass the pairs
that survived are read with true features, in one go, so that what drafting wrote is overwritten; the last row gives the
laws below the root. Below it every node reads its parent's output in place of the feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from foredraft.drafters.base import Context, Draft, plant
from foredraft.drafters.branch import Branch
from foredraft.drafters.growth import Growth, Plan, Scores, extend
from foredraft.kernels.cpu.library import library
from foredraft.kv.pool import KVPool
from foredraft.models.feature_lm import FeatureLM, FeatureNetwork, NativeFeatures
from foredraft.models.window import Span, Window
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


@dataclass(frozen=True)
class Root:
    """What the last true pair of a request said."""

    valid: int  # pairs in memory
    logits: Tensor  # [1, W] after it
    feature: Tensor  # [1, H] its output


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
        self._roots: dict[int, Root] = {}  # by slot

    @property
    def num_nodes(self) -> int:
        return self.plan.nodes

    def propose(self, batch: Batch) -> TokenTree:
        branches = {
            b: Branch(growth, growth.request.num_tokens - 2)
            for b in batch.drafting()
            if (growth := self._growth(batch, b)) is not None
        }
        if branches:
            self._grow(list(branches.values()), batch.page_size)
        empty = Draft()
        return plant(batch, [branches[b].growth.draft() if b in branches else empty for b in range(len(batch))])

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Read the pairs that survived, of every request whose pairs before them were read."""
        if commit.features is None:
            return
        spans: list[Span] = []
        features: list[Tensor] = []
        slots: list[int] = []
        for b, request in enumerate(batch.requests):
            tokens, root = commit.token_lists[b], self._roots.get(request.slot)
            if tokens and request.computed == (0 if root is None else root.valid):
                spans.append(Span(request.pages, request.computed, tokens, range(len(tokens))))
                features.append(commit.features[b, : len(tokens)])
                slots.append(request.slot)
        if spans:
            self._read(spans, features, slots, batch.page_size)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._roots.pop(slot, None)

    def _growth(self, batch: Batch, b: int) -> Growth | None:
        request = batch.requests[b]
        root = self._roots.get(request.slot)
        if root is None or root.valid != request.num_tokens - 1:
            return None
        plan = self.plan.cut(request.room, batch.budgets[b], request.verify == "block")
        return Growth(request, plan) if plan.nodes > 0 and plan.depth > 0 else None

    def _read(self, spans: Sequence[Span], features: Sequence[Tensor], slots: Sequence[int], page_size: int) -> None:
        ends, total = [], 0
        for span in spans:
            total += len(span.tokens)
            ends.append(total - 1)
        window = Window.build(spans, ends, page_size, self.context.device)
        taken = self.lm.taken(features[0] if len(features) == 1 else torch.cat(list(features)))
        logits, following = self.lm.forward(window, taken)
        for i, (span, slot, end) in enumerate(zip(spans, slots, ends, strict=True)):
            self._roots[slot] = Root(span.length, logits[i : i + 1], following[end : end + 1])

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
    return FeatureLM(network, context.dtype, KVPool(is_native), fused(network) if is_native else None)


def _joined(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))
