"""A drafter is untrusted: whatever it does may cost speed, never output."""

import logging
from collections.abc import Sequence
from itertools import chain

from foredraft.drafters.base import Draft, Drafter, plant
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree

log = logging.getLogger(__name__)
MAX_FAILURES = 3


class Guard:
    """Wraps a drafter: an exception or a malformed tree is no draft; after a few failures the drafter is left alone."""

    def __init__(self, drafter: Drafter | None, vocab_size: int) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.num_failures = 0

    @property
    def is_active(self) -> bool:
        return self.drafter is not None and self.num_failures < MAX_FAILURES

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None and self.is_active else ()

    @property
    def num_nodes(self) -> int:
        return self.drafter.num_nodes if self.drafter is not None and self.is_active else 0

    def propose(self, batch: Batch) -> TokenTree:
        """The drafter's tree, or one of roots alone."""
        if self.drafter is not None and self.is_active and batch.drafting():
            try:
                tree = self.drafter.propose(batch)
                fault = self._fault(batch, tree)
            except Exception as error:  # it may raise anything
                fault = f"{type(error).__name__}: {error}"
            if fault is None:
                return tree
            self._failed(f"propose: {fault}")
        return plant(batch, [Draft()] * len(batch))

    def observe(self, batch: Batch, commit: Commit) -> None:
        if self.drafter is not None and self.is_active:
            try:
                self.drafter.observe(batch, commit)
            except Exception as error:
                self._failed(f"observe: {type(error).__name__}: {error}")

    def forget(self, slots: Sequence[int]) -> None:
        if self.drafter is not None:
            try:
                self.drafter.forget(slots)
            except Exception as error:
                self._failed(f"forget: {type(error).__name__}: {error}")

    def _failed(self, what: str) -> None:
        self.num_failures += 1
        log.warning("the drafter failed (%s); %s", what, "ignored" if self.is_active else "it is not used any more")

    def _fault(self, batch: Batch, tree: TokenTree) -> str | None:
        """Why the tree cannot be verified; None if it can."""
        if len(tree.sizes) != len(batch):
            return f"{len(tree.sizes)} trees for {len(batch)} requests"
        if tree.known is not None:
            return "known successors, which are the engine's to say"
        for b, (tokens, parents) in enumerate(zip(tree.token_lists, tree.parent_lists, strict=True)):
            if not all(type(number) is int for number in chain(tokens, parents)):
                return "tokens or parents that are no integers"
            if tokens[:1] != [batch.root(b)]:
                return "node 0 is not the last committed token"
            if len(tokens) - 1 > batch.budgets[b]:
                return f"{len(tokens) - 1} nodes drafted, {batch.budgets[b]} allowed"
            is_chain = parents == list(range(-1, len(tokens) - 1))
            is_before = is_chain or all(0 <= parent < node for node, parent in enumerate(parents[1:], 1))
            if len(parents) != len(tokens) or parents[0] != -1 or not is_before:
                return "a parent is not an earlier node"
            if batch.requests[b].verify == "block" and not is_chain:
                return "branches for a request under block verification, which takes chains"
            if min(tokens) < 0 or max(tokens) >= self.vocab_size:
                return "a token outside the vocabulary"
            if len(tokens) > 1 and max(tree.depths[b]) > batch.requests[b].room:
                return "deeper than the request has room for"
        if tree.q is not None:
            rows = sum(size for size, scored in zip(tree.sizes, batch.scored, strict=True) if scored)
            if tuple(tree.q.shape) != (rows, self.vocab_size):
                return f"q has shape {tuple(tree.q.shape)}, not {(rows, self.vocab_size)}"
        return None
