"""A drafter is untrusted: whatever it does may cost speed, never output."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal

from foredraft.drafters.base import Drafter, bare
from foredraft.kv.memory import DraftMemory
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree

log = logging.getLogger(__name__)
MAX_FAILURES = 3
TIMEOUT = 5.0  # seconds one proposal may take
Kind = Literal["raised", "malformed", "slow"]


class Guard:
    """Wraps a drafter: an exception or a malformed tree is no draft; after a few failures the drafter is left alone.

    A proposal that took longer than `timeout` seconds is used and counts as a failure afterwards: a thread cannot be
    stopped, so that one that never returns holds up its engine, which the worker's heartbeat shows.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        vocab_size: int,
        timeout: float = TIMEOUT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.timeout = timeout
        self._own: Counter[str] = Counter()
        self._clock = clock

    @property
    def failures(self) -> Counter[str]:
        """By kind; those that drafters inside this one count themselves are among them."""
        return self._own + Counter(getattr(self.drafter, "failures", None))

    @property
    def num_failures(self) -> int:
        return self.failures.total()

    @property
    def is_active(self) -> bool:
        return self.drafter is not None and self._own.total() < MAX_FAILURES

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None and self.is_active else ()

    @property
    def wants_answers(self) -> bool:
        return bool(getattr(self.drafter, "wants_answers", False)) and self.is_active

    @property
    def num_nodes(self) -> int:
        return self.drafter.num_nodes if self.drafter is not None and self.is_active else 0

    def propose(self, batch: Batch) -> TokenTree:
        """The drafter's tree, or one of roots alone."""
        if self.drafter is not None and self.is_active and batch.drafting():
            began = self._clock()
            kind: Kind = "raised"
            try:
                tree = self.drafter.propose(batch)
                taken, kind = self._clock() - began, "malformed"
                fault = self._fault(batch, tree)
            except Exception as error:  # it may raise anything
                fault = f"{type(error).__name__}: {error}"
            if fault is None:
                if taken > self.timeout:
                    self._failed("slow", f"propose: {taken:.1f} s, and {self.timeout:g} s are allowed")
                return tree
            self._failed(kind, f"propose: {fault}")
        return bare(batch)

    def observe(self, batch: Batch, commit: Commit) -> None:
        if self.drafter is not None and self.is_active:
            try:
                self.drafter.observe(batch, commit)
            except Exception as error:
                self._failed("raised", f"observe: {type(error).__name__}: {error}")

    def forget(self, slots: Sequence[int]) -> None:
        if self.drafter is not None:
            try:
                self.drafter.forget(slots)
            except Exception as error:
                self._failed("raised", f"forget: {type(error).__name__}: {error}")

    @property
    def memory(self) -> DraftMemory | None:
        """What the drafter keeps on the target's pages; None once it is left alone."""
        return getattr(self.drafter, "memory", None) if self.is_active else None

    def settle(self, slots: Sequence[int]) -> None:
        """Have the drafter read in what it put off."""
        memory = self.memory
        if memory is not None:
            try:
                memory.settle(slots)
            except Exception as error:
                self._failed("raised", f"settle: {type(error).__name__}: {error}")

    def _failed(self, kind: Kind, what: str) -> None:
        self._own[kind] += 1
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
            if tree.drawn is not None and [type(count) for count in tree.drawn] != [int] * rows:
                return f"drawn does not say of {rows} rows how many children were drawn"
        return None
