"""Base class of drafters that read token ids alone: no hidden states and no text."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.spec import DrafterSpec
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


class TokenState(Protocol):
    """State of one request, such as an index of its n-grams. It is extended as tokens are committed."""

    tokens: list[int]  # committed tokens that the state includes: a prefix of the sequence

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the next committed tokens to `tokens` and update the state."""


S = TypeVar("S", bound=TokenState)


class TokenDrafter(ABC, Generic[S]):
    """Drafter that reads committed tokens alone.

    A subclass implements `new_state`, which makes the state of a request, and methods that take a state. The methods
    that take a request look up its state and call them:

    - `draft` calls `draft_tokens`. `propose` calls `draft` for every request.
    - `match_strength` calls `state_match_strength`. Optional; the default returns 0.
    - `continue_draft` calls `continue_tokens`. Optional; the default drafts nothing.

    A state is extended when its request drafts, not when tokens are committed.

    Args:
        num_speculative_tokens: K, the largest depth of a draft.
        max_nodes: maximum number of draft nodes. Default None = `num_speculative_tokens`.
        samples_drafts: see `DrafterSpec.samples_drafts`. Default False.
    """

    def __init__(
        self, num_speculative_tokens: int, max_nodes: int | None = None, *, samples_drafts: bool = False
    ) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.spec = DrafterSpec(
            num_speculative_tokens if max_nodes is None else max_nodes,
            reads_commits=type(self).observe is not TokenDrafter.observe,
            is_token_source=True,
            samples_drafts=samples_drafts,
        )
        self._states: dict[int, S] = {}  # by slot

    @abstractmethod
    def new_state(self) -> S:
        """Make the state of a new request, without tokens."""

    @abstractmethod
    def draft_tokens(self, state: S, request: Request, depth: int, budget: int) -> Draft:
        """Draft at most `budget` nodes, none deeper than `depth` (at least 1). An empty Draft drafts nothing."""

    def state_match_strength(self, state: S) -> int:
        """Return a measure of how reliable a draft from this state is; see `TokenDraftSource.match_strength`."""
        return 0

    def continue_tokens(self, state: S, request: Request, path: Sequence[int], depth: int, budget: int) -> Draft:
        """Draft below `path`, one or more draft tokens that the state does not include, as if they were committed.

        The default drafts nothing.
        """
        return Draft()

    def propose(self, batch: Batch) -> TokenTree:
        """Draft for every request that may draft; see `Drafter.propose`."""
        return to_token_tree(
            batch, {b: self.draft(batch.requests[b], batch.granted_nodes[b]) for b in batch.find_drafting()}
        )

    def draft(self, request: Request, budget: int) -> Draft:
        """Draft at most `budget` nodes for one request."""
        state = self._update_state(request)
        depth = min(self.num_speculative_tokens, budget, request.max_draft_depth)
        return self.draft_tokens(state, request, depth, budget) if depth > 0 else Draft()

    def match_strength(self, request: Request) -> int:
        """Return the `state_match_strength` of a request, after its last committed token."""
        return self.state_match_strength(self._update_state(request))

    def continue_draft(self, request: Request, path: Sequence[int], budget: int) -> Draft:
        """Draft at most `budget` nodes below `path`; see `TokenDraftSource.continue_draft`."""
        depth = min(self.num_speculative_tokens, budget, request.max_draft_depth - len(path))
        return self.continue_tokens(self._update_state(request), request, path, depth, budget) if depth > 0 else Draft()

    def _update_state(self, request: Request) -> S:
        """Return the state of a request, extended by the tokens that were committed since the last call."""
        state = self._states.get(request.slot)
        if state is None:
            state = self._states[request.slot] = self.new_state()
        state.extend(request.get_tokens(len(state.tokens), request.num_tokens))
        return state

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Do nothing: the state is extended at the next draft."""

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._states.pop(slot, None)
