"""A drafter is untrusted: whatever it does may cost speed, never output."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

from foredraft.drafters.base import Drafter, bare
from foredraft.drafters.probation import MAX_FAILURES as MAX_FAILURES
from foredraft.drafters.probation import TIMEOUT as TIMEOUT
from foredraft.drafters.probation import Clock, Kind, Probation
from foredraft.drafters.witness import Kept, Witness, attempt, restored
from foredraft.errors import ForedraftError
from foredraft.kv.memory import DraftMemory
from foredraft.models.window import NORMED
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

T = TypeVar("T")
MEMBERS = ("taps", "num_nodes", "propose", "observe", "forget")  # of every Drafter


class Guard:
    """Wraps a drafter: an exception, a malformed tree or a changed request is no draft; after a few failures the
    drafter rests (`drafters/probation.py`), and is then tried again.

    A proposal that took too long (`Pace`) is used and counts as a failure afterwards: a thread cannot be stopped, so
    that one that never returns holds up its engine, which the worker's heartbeat shows. A drafter made of guarded parts
    is not timed, and its requests are not compared: its parts answer for that, each for itself.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        vocab_size: int,
        timeout: float = TIMEOUT,
        clock: Clock = time.perf_counter,
        name: str = "",
        num_layers: int | None = None,
    ) -> None:
        """timeout: seconds one proposal may take. name: of the drafter in logs and metrics. num_layers: of the target;
        None = any boundary is taken."""
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.probation = Probation(name, clock)
        self.parts = _probations(drafter)
        self._num_layers = num_layers
        self._witness = Witness()
        self._clock = clock
        self._pass_from = clock()  # when this step's pass began; where no draft was asked for, when the last step ended
        self._has_proposed = False  # in this step
        self.timeout = timeout

    @property
    def probations(self) -> tuple[Probation, ...]:
        """Of the drafter, and of its parts that fail alone."""
        return (self.probation, *self.parts)

    @property
    def failures(self) -> Counter[str]:
        """By kind, those of the parts included."""
        return sum((probation.failures for probation in self.probations), Counter())

    @property
    def num_failures(self) -> int:
        return self.failures.total()

    @property
    def is_active(self) -> bool:
        """Whether the drafter is used in this step; a rest ends between steps, in `observe`."""
        return self.drafter is not None and not self.probation.is_resting

    @property
    def timeout(self) -> float:
        """Seconds one proposal may take, of this drafter and of every part that fails alone."""
        return self.probation.pace.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        for probation in self.probations:
            probation.pace.timeout = seconds

    # -- what the drafter is: asked anew for every step, since a drafter may change it

    @property
    def taps(self) -> tuple[int, ...]:
        return self._read("taps", (), lambda drafter: _taps(drafter, self._num_layers))

    @property
    def num_nodes(self) -> int:
        return self._read("num_nodes", 0, _num_nodes)

    @property
    def wants_answers(self) -> bool:
        return self._read("wants_answers", False, lambda drafter: bool(getattr(drafter, "wants_answers", False)))

    @property
    def memory(self) -> DraftMemory | None:
        """What the drafter keeps on the target's pages; None while it rests."""
        return self._read("memory", None, _memory)

    def _read(self, what: str, default: T, read: Callable[[Drafter], T]) -> T:
        """One property of the drafter; the default while it rests or where it cannot be read."""
        if self.drafter is None or self.probation.is_resting:
            return default
        try:
            return read(self.drafter)
        except Exception as error:  # it may raise anything
            self.probation.failed("malformed", f"{what}: {type(error).__name__}: {error}")
            return default

    # -- the verbs

    def propose(self, batch: Batch) -> TokenTree:
        """The drafter's tree, or one of roots alone."""
        if self.drafter is not None and self.is_active and batch.drafting():
            tree = self._proposed(self.drafter, batch)
        else:
            tree = bare(batch)
        self._pass_from, self._has_proposed = self._clock(), True
        return tree

    def _proposed(self, drafter: Drafter, batch: Batch) -> TokenTree:
        noted = self._note(batch.requests)
        began = self._clock()
        kind: Kind = "raised"
        fault: str | None = None
        tree = None
        try:
            given = drafter.propose(batch)
            taken, kind = self._clock() - began, "malformed"
            tree = TokenTree.copied(given)  # the drafter may keep what it gave, and change it
        except Exception as error:  # it may raise anything
            taken, fault = self._clock() - began, f"{type(error).__name__}: {error}"
        finally:  # a KeyboardInterrupt passes, and what it leaves behind must be right too
            changed = restored(noted)
        if changed is not None:
            kind, fault = "mutated", changed
        elif tree is not None:
            fault = self._why_not(batch, tree)
        if fault is not None or tree is None:
            self.probation.failed(kind, f"propose: {fault}", taken)
            return bare(batch)
        self.probation.took(taken, is_timed=not self.parts)
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Show the drafter what was committed. This ends a step, and so a rest that is over."""
        if self.drafter is None:
            return
        if self.probation.is_resting:
            self.probation.wake()
            return
        has_prompt = max(batch.chunks, default=1) > 1
        if self._has_proposed or has_prompt:
            self.probation.pace.passed(self._clock() - self._pass_from, has_prompt)
        drafter, own = self.drafter, commit.copied()
        attempt(self.probation, self._note(batch.requests), "observe", lambda: drafter.observe(batch, own))
        self._pass_from, self._has_proposed = self._clock(), False

    def forget(self, slots: Sequence[int]) -> None:
        if self.drafter is not None:
            drafter = self.drafter
            attempt(self.probation, self._note(self._witness.shown()), "forget", lambda: drafter.forget(slots))
            self._witness.forget(slots)

    def settle(self, slots: Sequence[int]) -> None:
        """Have the drafter read in what it put off."""
        memory = self.memory
        if memory is not None:
            attempt(self.probation, self._note(self._witness.shown()), "settle", lambda: memory.settle(slots))

    def _note(self, requests: Iterable[Request]) -> Sequence[Kept]:
        return () if self.parts else self._witness.note(requests)

    def _why_not(self, batch: Batch, tree: TokenTree) -> str | None:
        try:
            return self._fault(batch, tree)
        except Exception as error:  # a tree of anything
            return f"{type(error).__name__}: {error}"

    def _fault(self, batch: Batch, tree: TokenTree) -> str | None:
        """Why the tree cannot be verified; None if it can."""
        if len(tree.sizes) != len(batch):
            return f"{len(tree.sizes)} trees for {len(batch)} requests"
        if tree.known is not None:
            return "known successors, which are the engine's to say"
        for b in range(len(batch)):
            fault = self._fault_of(batch, tree, b)
            if fault is not None:
                return fault
        if tree.q is not None:
            rows = sum(size for size, scored in zip(tree.sizes, batch.scored, strict=True) if scored)
            if tuple(tree.q.shape) != (rows, self.vocab_size):
                return f"q has shape {tuple(tree.q.shape)}, not {(rows, self.vocab_size)}"
            if tree.drawn is not None and [type(count) for count in tree.drawn] != [int] * rows:
                return f"drawn does not say of {rows} rows how many children were drawn"
        return None

    def _fault_of(self, batch: Batch, tree: TokenTree, b: int) -> str | None:
        tokens, parents = tree.token_lists[b], tree.parent_lists[b]
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
        if len(tokens) > 1 and (len(tokens) - 1 if is_chain else max(tree.depths[b])) > batch.requests[b].room:
            return "deeper than the request has room for"
        return None


def checked(drafter: Drafter, num_layers: int) -> Drafter:
    """A drafter that was handed in, before it is used. Raises ForedraftError for properties of no use. num_layers: of
    the target."""
    try:
        _members(drafter)
        _taps(drafter, num_layers)
        _num_nodes(drafter)
        _memory(drafter)
        bool(getattr(drafter, "wants_answers", False))
    except Exception as error:  # they may raise anything
        what = " ".join(str(error).split()) or type(error).__name__
        raise ForedraftError(f"the drafter {type(drafter).__name__} cannot be used: {what}") from error
    return drafter


def _members(drafter: Drafter) -> None:
    missing = [name for name in MEMBERS if not hasattr(drafter, name)]
    if missing:
        raise TypeError(
            f"it has no {', '.join(missing)}; give the name of a method, a dict of options, or an object with "
            f"{', '.join(MEMBERS)}"
        )


def _taps(drafter: Drafter, num_layers: int | None) -> tuple[int, ...]:
    taps = drafter.taps
    if type(taps) is not tuple or not all(type(tap) is int for tap in taps):
        raise TypeError(f"taps must be a tuple of integers, got {taps!r}")
    if num_layers is not None and not all(tap == NORMED or 0 <= tap <= num_layers for tap in taps):
        raise ValueError(f"taps must be boundaries of the target, {NORMED} or 0 to {num_layers}, got {taps}")
    return taps


def _num_nodes(drafter: Drafter) -> int:
    count = drafter.num_nodes
    if type(count) is not int or count < 0:
        raise TypeError(f"num_nodes must be an integer, 0 or more, got {count!r}")
    return count


def _memory(drafter: Drafter) -> DraftMemory | None:
    memory = getattr(drafter, "memory", None)
    if memory is not None and not isinstance(memory, DraftMemory):
        raise TypeError(f"memory must be a DraftMemory or None, got {type(memory).__name__}")
    return memory


def _probations(drafter: Drafter | None) -> tuple[Probation, ...]:
    """Of a drafter's parts that fail alone, where it is made of such."""
    try:
        found = tuple(getattr(drafter, "probations", ()))
    except Exception:  # it may raise anything
        return ()
    return found if all(isinstance(one, Probation) for one in found) else ()
