"""Members of an ensemble, and their drafts in a step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from foredraft.drafters.draft import Draft
from foredraft.drafters.ensemble.selector import CandidateDraft
from foredraft.drafters.ensemble.tree_merge import MergedTree
from foredraft.drafters.failure_backoff import Clock, FailureBackoff
from foredraft.drafters.interface import NO_DRAFT, Drafter, TokenDraftSource
from foredraft.drafters.request_snapshot import SnapshotCache, call_isolated
from foredraft.request import Request
from foredraft.tree import TokenTree

T = TypeVar("T")
MAX_MATCH_STRENGTH = 12  # tokens; longer matches share one estimate


@dataclass(eq=False)
class EnsembleMember:
    """One drafter of an ensemble.

    A token member (`is_token_only`) is called directly, isolated by `backoff`; a model member through `sandboxed`.
    """

    name: str
    drafter: Drafter
    sandboxed: Drafter  # the drafter in a sandbox of its own
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        self.backoff = FailureBackoff(self.name, self.clock)  # for calls of a token member, which bypass the sandbox
        self._snapshots = SnapshotCache()
        spec = self.drafter.spec
        self.is_token_only = spec.is_token_source and not spec.hidden_layers
        self.reads_states = bool(spec.hidden_layers)
        self.samples_drafts = self.is_token_only and spec.samples_drafts
        # the quarantine of a sandbox ends in `observe`, and that of a token member in the ensemble
        self.is_observed = spec.reads_commits or not self.is_token_only

    @property
    def backoffs(self) -> tuple[FailureBackoff, ...]:
        """Backoffs of the direct calls and of the sandbox."""
        return (self.backoff, *self.sandboxed.spec.member_backoffs)

    @property
    def token_drafter(self) -> TokenDraftSource | None:
        """The drafter, if it is a token member and not quarantined."""
        if not self.is_token_only or self.backoff.is_quarantined:
            return None
        return cast(TokenDraftSource, self.drafter)  # declared by `DrafterSpec.is_token_source`

    @property
    def max_nodes(self) -> int:
        return 0 if self.backoff.is_quarantined else self.sandboxed.spec.max_nodes

    def find_candidate(self, index: int, request: Request, budget: int, can_wait: bool) -> CandidateDraft | None:
        """Draft from committed tokens as the member with this index; None without a draft.

        `can_wait`: a draft that takes time is not made yet (`make_draft`).
        """
        token_drafter = self.token_drafter
        max_nodes = 0 if token_drafter is None else min(budget, self.max_nodes)
        if token_drafter is None or max_nodes <= 0:
            return None
        if can_wait and self.samples_drafts and not request.spec.sampling.is_greedy:
            strength = self.call_drafter("draft", request, lambda: token_drafter.match_strength(request))
            if strength is None or strength == NO_DRAFT:
                return None
            return CandidateDraft(
                None, (index, min(strength, MAX_MATCH_STRENGTH)), (index,), max_nodes, max_nodes, is_sampled=True
            )
        result = self.call_drafter("draft", request, lambda: _draft_with_strength(token_drafter, request, max_nodes))
        if result is None:
            return None
        draft, weight = result
        if not draft.tokens:
            return None
        is_sampled = draft.q is not None
        size = max_nodes if is_sampled else len(draft.tokens)
        return CandidateDraft(
            draft,
            (index, weight),
            (index,),
            size,
            max_nodes if is_sampled else compute_depth(draft.parents),
            is_sampled,
        )

    def make_draft(self, request: Request, budget: int) -> Draft:
        """Make the draft of a candidate that has none yet; an empty one if that fails."""
        token_drafter = self.token_drafter
        if token_drafter is None:
            return Draft()
        return self.call_drafter("draft", request, lambda: token_drafter.draft(request, budget)) or Draft()

    def call_drafter(self, operation: str, request: Request, call: Callable[[], T]) -> T | None:
        """Call the token drafter in isolation; None if the call failed."""
        return call_isolated(self.backoff, self._snapshots.capture((request,)), operation, call, is_timed=True)

    def forget(self, slots: Sequence[int]) -> None:
        self.sandboxed.forget(slots)
        self._snapshots.forget(slots)


def is_draft_sampled(request: Request) -> bool:
    """Return whether a request's drafts are verified as samples of their q."""
    return request.spec.rule.uses_q and not request.spec.sampling.is_greedy


def merge_drafts(candidates: Sequence[CandidateDraft], budget: int) -> CandidateDraft:
    """Merge deterministic drafts of several token members into one candidate."""
    merged = MergedTree.from_root(0)
    for candidate in candidates:
        if candidate.draft is not None:
            merged.graft(candidate.draft, budget)
    parts = tuple(i for candidate in candidates for i in candidate.members)
    draft = Draft(tuple(merged.tokens[1:]), tuple(merged.parents[1:]))
    key = parts, max(candidate.key[1] for candidate in candidates)
    return CandidateDraft(
        draft, key, parts, merged.num_draft_nodes, max(candidate.depth for candidate in candidates), False
    )


def make_single_tree(draft: Draft, root: int) -> MergedTree:
    """Make one request's tree from a sampled draft, with its q."""
    return MergedTree.from_tree(TokenTree([[root, *draft.tokens]], [[-1, *draft.parents]], draft.q), 0, 0)


def _draft_with_strength(drafter: TokenDraftSource, request: Request, max_nodes: int) -> tuple[Draft, int]:
    draft = drafter.draft(request, max_nodes)
    return draft, min(max(drafter.match_strength(request), 0), MAX_MATCH_STRENGTH) if draft.tokens else 0


def compute_depth(parents: Sequence[int]) -> int:
    """Return the depth of a draft from its parents; 0 = the root."""
    if not parents:
        return 0
    if parents[-1] == len(parents) - 1 and tuple(parents) == tuple(range(len(parents))):
        return len(parents)
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)
