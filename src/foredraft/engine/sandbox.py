"""Sandbox for untrusted drafters: a faulty drafter may reduce speed, but cannot change output."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from foredraft.drafters.draft import root_tree
from foredraft.drafters.failure_backoff import MAX_FAILURES as MAX_FAILURES
from foredraft.drafters.failure_backoff import TIMEOUT as TIMEOUT
from foredraft.drafters.failure_backoff import Clock, FailureBackoff, FailureKind
from foredraft.drafters.interface import Drafter
from foredraft.drafters.no_drafter import NoDrafter
from foredraft.drafters.request_snapshot import (
    RequestSnapshot,
    SnapshotCache,
    call_isolated,
    restore_requests,
)
from foredraft.drafters.spec import NO_DRAFT_SPEC, DrafterSpec
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.engine.drafter_validation import validate_spec
from foredraft.engine.tree_validation import ValidatedTree, find_tree_fault
from foredraft.kv.draft_kv import DraftKV
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


class SandboxedDrafter(DrafterWrapper):
    """Wrapper that turns faults of a drafter into steps without a draft.

    Faults are exceptions, malformed specs and trees, and changes to a request, which are undone. After several failures
    the drafter is in quarantine for a while (`drafters/failure_backoff.py`).

    A slow proposal (`ProposalTimeLimit`) is used, but counts as a failure. A proposal that never returns blocks the
    engine, because a thread cannot be stopped; the worker's heartbeat reports that.

    If the drafter has sandboxed members (`DrafterSpec.member_backoffs`), timing, request checks and copies of commits
    are left to their sandboxes. A member's tree that the drafter passes on as it is was validated there, and is not
    validated again.
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
        super().__init__(NoDrafter() if drafter is None else drafter)
        self.vocab_size = vocab_size
        self.backoff = FailureBackoff(name, clock)
        self.member_backoffs = _find_member_backoffs(self.drafter)
        self._num_layers = num_layers
        self._given_spec = NO_DRAFT_SPEC  # the drafter's last valid spec
        self._idle_spec = self._wrap_spec(NO_DRAFT_SPEC)
        self._spec = self._idle_spec  # that of `_given_spec`
        self._snapshots = SnapshotCache()
        # Start of this step's target pass, in seconds of the clock; without a proposal, end of the last step.
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
        return not self.backoff.is_quarantined

    @property
    def timeout(self) -> float:
        """Seconds one proposal may take, for this drafter and each of its members."""
        return self.backoff.time_limit.timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        for backoff in self.backoffs:
            backoff.time_limit.timeout = seconds

    # -- the interface of a drafter

    @property
    def spec(self) -> DrafterSpec:
        """Valid spec of the drafter; no nodes, layers and KV during a quarantine, or if the spec is invalid."""
        if self.backoff.is_quarantined:
            return self._idle_spec
        try:
            given = self.drafter.spec
            if given is not self._given_spec:
                validate_spec(given, self._num_layers)
                self._given_spec, self._spec = given, self._wrap_spec(given)
        except Exception as error:  # untrusted code may raise any exception
            self.backoff.record_failure("malformed", f"spec: {type(error).__name__}: {error}")
            return self._idle_spec
        return self._spec

    def _wrap_spec(self, spec: DrafterSpec) -> DrafterSpec:
        """Return the spec of the sandbox, which reads every commit: it measures time, and ends quarantines."""
        return replace(spec, reads_commits=True, reads_plain_commits=True, member_backoffs=self.backoffs)

    @property
    def draft_kv(self) -> DraftKV | None:
        """Draft KV of the drafter on the target's pages; None during a quarantine."""
        return self.spec.draft_kv

    def propose(self, batch: Batch) -> TokenTree:
        """Return the drafter's tree, or a tree of roots if it has no valid one."""
        tree = self._propose_safely(batch) if self.is_active and batch.find_drafting() else root_tree(batch)
        self._pass_started, self._has_proposed = self.backoff.clock(), True
        return tree

    def _propose_safely(self, batch: Batch) -> TokenTree:
        """Call `propose`, restore changed requests, and validate the tree."""
        snapshots = self._take_snapshots(batch.requests)
        start = self.backoff.clock()
        kind: FailureKind = "raised"
        fault: str | None = None
        tree, is_validated = None, False
        try:
            proposal = self.drafter.propose(batch)
            seconds, kind = self.backoff.clock() - start, "malformed"
            is_validated = type(proposal) is ValidatedTree and proposal.is_valid_for(batch)  # by a member's sandbox
            tree = proposal if is_validated else ValidatedTree.from_proposal(proposal, batch)
        except Exception as error:  # untrusted code may raise any exception
            seconds, fault = self.backoff.clock() - start, f"{type(error).__name__}: {error}"
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
        if self.backoff.is_quarantined:
            self.backoff.release_if_due()
            return
        has_prompt = max(batch.num_new_tokens, default=1) > 1
        if self._has_proposed or has_prompt:
            self.backoff.time_limit.record_pass(self.backoff.clock() - self._pass_started, has_prompt)
        if self.spec is self._spec and self._reads(batch, commit):
            drafter, seen = self.drafter, commit if self.member_backoffs else commit.copy()
            call_isolated(
                self.backoff, self._take_snapshots(batch.requests), "observe", lambda: drafter.observe(batch, seen)
            )
        self._pass_started, self._has_proposed = self.backoff.clock(), False

    def _reads(self, batch: Batch, commit: Commit) -> bool:
        """Return whether `observe` of the drafter does something with this commit. Its spec is valid."""
        spec = self._given_spec
        if not spec.reads_commits or not (spec.reads_plain_commits or any(batch.granted_nodes)):
            return False
        return not self._misses_outputs(commit)

    def _misses_outputs(self, commit: Commit) -> bool:
        """Return whether the commit lacks outputs of the target that the drafter reads, as its spec permits."""
        spec = self._given_spec
        if self.member_backoffs:
            return False
        if spec.hidden_layers:
            return spec.missed_states != "forbidden" and commit.path_features is None
        has_tokens = commit.target_argmax is not None or commit.target_candidates is not None
        return spec.token_steps != "all" and spec.needs_tokens and not has_tokens

    def forget(self, slots: Sequence[int]) -> None:
        """Have the drafter drop its state of these slots."""
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


def _find_member_backoffs(drafter: Drafter) -> tuple[FailureBackoff, ...]:
    """Return the failure states of a drafter's sandboxed members; () if it has none."""
    try:
        backoffs = tuple(drafter.spec.member_backoffs)
    except Exception:  # untrusted code may raise any exception
        return ()
    return backoffs if all(isinstance(backoff, FailureBackoff) for backoff in backoffs) else ()
