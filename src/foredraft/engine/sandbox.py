"""Sandbox for untrusted drafters: a faulty drafter may reduce speed, but cannot change output."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from foredraft.drafters.draft import root_tree
from foredraft.drafters.failure_backoff import MAX_FAILURES as MAX_FAILURES
from foredraft.drafters.failure_backoff import TIMEOUT as TIMEOUT
from foredraft.drafters.failure_backoff import Clock, FailureBackoff, FailureKind
from foredraft.drafters.interface import Drafter
from foredraft.drafters.request_snapshot import (
    RequestSnapshot,
    SnapshotCache,
    call_isolated,
    restore_requests,
)
from foredraft.engine.tree_validation import ValidatedTree, find_tree_fault
from foredraft.errors import ForedraftError
from foredraft.kv.draft_kv import DraftKV
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

T = TypeVar("T")
REQUIRED_MEMBERS = ("hidden_layers", "max_nodes", "propose", "observe", "forget")  # attributes of every Drafter


class SandboxedDrafter:
    """Wrapper that turns faults of a drafter into steps without a draft.

    Faults are exceptions, malformed trees, and changes to a request, which are undone. After several failures the
    drafter is in quarantine for a while (`drafters/failure_backoff.py`).

    A slow proposal (`ProposalTimeLimit`) is used, but counts as a failure. A proposal that never returns blocks the
    engine, because a thread cannot be stopped; the worker's heartbeat reports that.

    If the drafter has sandboxed members (an ensemble), timing and request checks are left to their sandboxes. A
    member's tree that the drafter passes on as it is was validated there, and is not validated again.
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
        """Wrap a drafter.

        Args:
            drafter: the untrusted drafter. None = never draft.
            vocab_size: V of the target.
            timeout: seconds one proposal may take.
            clock: time in seconds.
            name: the drafter's name in logs and metrics.
            num_layers: layers of the target, to check `hidden_layers`. None = not checked.
        """
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.backoff = FailureBackoff(name, clock)
        self.member_backoffs = _find_backoffs(drafter)
        self._num_layers = num_layers
        self._snapshots = SnapshotCache()
        self._clock = clock
        # Start of this step's target pass, in seconds of `clock`; without a proposal, end of the last step.
        self._pass_started = clock()
        self._has_proposed = False  # `propose` was called in this step
        self.timeout = timeout

    @property
    def backoffs(self) -> tuple[FailureBackoff, ...]:
        """Failure states of the drafter and of its sandboxed members."""
        return (self.backoff, *self.member_backoffs)

    @property
    def failures(self) -> Counter[str]:
        """Failures by kind, members included."""
        return sum((backoff.failures for backoff in self.backoffs), Counter())

    @property
    def num_failures(self) -> int:
        return self.failures.total()

    @property
    def is_active(self) -> bool:
        """True if the drafter is used in this step. A quarantine ends between steps, in `observe`."""
        return self.drafter is not None and not self.backoff.is_quarantined

    @property
    def timeout(self) -> float:
        """Seconds one proposal may take, for this drafter and each of its members."""
        return self.backoff.time_limit.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        for backoff in self.backoffs:
            backoff.time_limit.timeout = seconds

    # -- properties of the drafter: read again in every step, since a drafter may change them

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self._read_property("hidden_layers", (), lambda drafter: _read_hidden_layers(drafter, self._num_layers))

    @property
    def max_nodes(self) -> int:
        return self._read_property("max_nodes", 0, _read_max_nodes)

    @property
    def needs_target_argmax(self) -> bool:
        return self._read_property(
            "needs_target_argmax", False, lambda drafter: bool(getattr(drafter, "needs_target_argmax", False))
        )

    @property
    def draft_kv(self) -> DraftKV | None:
        """Draft KV of the drafter on the target's pages; None during a quarantine."""
        return self._read_property("draft_kv", None, _read_draft_kv)

    def _read_property(self, name: str, default: T, read: Callable[[Drafter], T]) -> T:
        """Read a property of the drafter; return the default during a quarantine or if reading fails."""
        if self.drafter is None or self.backoff.is_quarantined:
            return default
        try:
            return read(self.drafter)
        except Exception as error:  # untrusted code may raise any exception
            self.backoff.record_failure("malformed", f"{name}: {type(error).__name__}: {error}")
            return default

    # -- the methods of a drafter

    def propose(self, batch: Batch) -> TokenTree:
        """Return the drafter's tree, or a tree of roots if it has no valid one."""
        if self.drafter is not None and self.is_active and batch.find_drafting():
            tree = self._propose_safely(self.drafter, batch)
        else:
            tree = root_tree(batch)
        self._pass_started, self._has_proposed = self._clock(), True
        return tree

    def _propose_safely(self, drafter: Drafter, batch: Batch) -> TokenTree:
        """Call `propose`, restore changed requests, and validate the tree."""
        snapshots = self._take_snapshots(batch.requests)
        start = self._clock()
        kind: FailureKind = "raised"
        fault: str | None = None
        tree, is_validated = None, False
        try:
            proposal = drafter.propose(batch)
            seconds, kind = self._clock() - start, "malformed"
            is_validated = type(proposal) is ValidatedTree and proposal.is_valid_for(batch)  # by a member's sandbox
            tree = proposal if is_validated else ValidatedTree.from_proposal(proposal, batch)
        except Exception as error:  # untrusted code may raise any exception
            seconds, fault = self._clock() - start, f"{type(error).__name__}: {error}"
        finally:  # requests are restored even if a KeyboardInterrupt passes through
            mutation = restore_requests(snapshots)
        if mutation is not None:
            kind, fault = "mutated", mutation
        elif tree is not None and not is_validated:
            fault = self._validate_tree(batch, tree)
        if fault is not None or tree is None:
            self.backoff.record_failure(kind, f"propose: {fault}", seconds)
            return root_tree(batch)
        self.backoff.record_call(seconds, is_timed=not self.member_backoffs)
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Pass a copy of the commit to the drafter. A quarantine that is over ends here, between two steps."""
        if self.drafter is None:
            return
        if self.backoff.is_quarantined:
            self.backoff.release_if_due()
            return
        has_prompt = max(batch.num_new_tokens, default=1) > 1
        if self._has_proposed or has_prompt:
            self.backoff.time_limit.record_pass(self._clock() - self._pass_started, has_prompt)
        drafter, commit_copy = self.drafter, commit.copy()
        call_isolated(
            self.backoff, self._take_snapshots(batch.requests), "observe", lambda: drafter.observe(batch, commit_copy)
        )
        self._pass_started, self._has_proposed = self._clock(), False

    def forget(self, slots: Sequence[int]) -> None:
        """Have the drafter drop its state of these slots."""
        if self.drafter is not None:
            drafter = self.drafter
            call_isolated(
                self.backoff,
                self._take_snapshots(self._snapshots.list_requests()),
                "forget",
                lambda: drafter.forget(slots),
            )
            self._snapshots.forget(slots)

    def flush(self, slots: Sequence[int]) -> None:
        """Have the drafter write the draft KV of these slots that it has deferred."""
        draft_kv = self.draft_kv
        if draft_kv is not None:
            call_isolated(
                self.backoff,
                self._take_snapshots(self._snapshots.list_requests()),
                "flush",
                lambda: draft_kv.flush(slots),
            )

    def _take_snapshots(self, requests: Iterable[Request]) -> Sequence[RequestSnapshot]:
        return () if self.member_backoffs else self._snapshots.capture(requests)

    def _validate_tree(self, batch: Batch, tree: TokenTree) -> str | None:
        try:
            return find_tree_fault(batch, tree, self.vocab_size)
        except Exception as error:  # the fields of the tree may have any type
            return f"{type(error).__name__}: {error}"


def validate_drafter(drafter: Drafter, num_layers: int) -> Drafter:
    """Check a drafter object from the caller before it is used, and return it.

    Args:
        drafter: object with the interface of a drafter.
        num_layers: layers of the target.

    Raises:
        ForedraftError: a member is missing or has an invalid value.
    """
    try:
        _check_members(drafter)
        _read_hidden_layers(drafter, num_layers)
        _read_max_nodes(drafter)
        _read_draft_kv(drafter)
        bool(getattr(drafter, "needs_target_argmax", False))
    except Exception as error:  # untrusted code may raise any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ForedraftError(f"the drafter {type(drafter).__name__} cannot be used: {reason}") from error
    return drafter


def _check_members(drafter: Drafter) -> None:
    missing = [name for name in REQUIRED_MEMBERS if not hasattr(drafter, name)]
    if missing:
        raise TypeError(
            f"it has no {', '.join(missing)}; give the name of a method, a dict of options, or an object with "
            f"{', '.join(REQUIRED_MEMBERS)}"
        )


def _read_hidden_layers(drafter: Drafter, num_layers: int | None) -> tuple[int, ...]:
    layers = drafter.hidden_layers
    if type(layers) is not tuple or not all(type(layer) is int for layer in layers):
        raise TypeError(f"hidden_layers must be a tuple of integers, got {layers!r}")
    if num_layers is not None and not all(layer == AFTER_FINAL_NORM or 0 <= layer <= num_layers for layer in layers):
        raise ValueError(
            f"hidden_layers must be boundaries of the target, {AFTER_FINAL_NORM} or 0 to {num_layers}, got {layers}"
        )
    return layers


def _read_max_nodes(drafter: Drafter) -> int:
    count = drafter.max_nodes
    if type(count) is not int or count < 0:
        raise TypeError(f"max_nodes must be an integer, 0 or more, got {count!r}")
    return count


def _read_draft_kv(drafter: Drafter) -> DraftKV | None:
    draft_kv = getattr(drafter, "draft_kv", None)
    if draft_kv is not None and not isinstance(draft_kv, DraftKV):
        raise TypeError(f"draft_kv must be a DraftKV or None, got {type(draft_kv).__name__}")
    return draft_kv


def _find_backoffs(drafter: Drafter | None) -> tuple[FailureBackoff, ...]:
    """Return the failure states of a drafter's sandboxed members; () if it has none."""
    try:
        backoffs = tuple(getattr(drafter, "backoffs", ()))
    except Exception:  # untrusted code may raise any exception
        return ()
    return backoffs if all(isinstance(backoff, FailureBackoff) for backoff in backoffs) else ()
