"""Base class of drafters that need only a request's own tokens."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


class TextState(Protocol):
    """State of one request, updated token by token."""

    tokens: list[int]  # committed tokens read so far

    def extend(self, tokens: Sequence[int]) -> None:
        """Read the next committed tokens."""


L = TypeVar("L", bound=TextState)


class TextDrafter(ABC, Generic[L]):
    """Drafter that reads committed tokens alone. A method implements `new_state` and `draft_tokens`.

    A state reads the tokens of its request when the request is drafted for, not when they are committed.
    """

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self._states: dict[int, L] = {}  # by slot

    @property
    def max_nodes(self) -> int:
        return self.num_speculative_tokens

    @abstractmethod
    def new_state(self) -> L:
        """Make the state of a request before its first token."""

    @abstractmethod
    def draft_tokens(self, state: L, request: Request, depth: int, budget: int) -> Draft:
        """Draft at most `budget` nodes of depth at most `depth` (1 or more)."""

    def state_match_strength(self, state: L) -> int:
        """Return the evidence for a draft from this state, such as the length of the match in tokens; 0 = unknown."""
        return 0

    def continue_tokens(self, state: L, request: Request, path: Sequence[int], depth: int, budget: int) -> Draft:
        """Draft as if `path` (one token or more) were committed too. An empty draft if the method cannot."""
        return Draft()

    def propose(self, batch: Batch) -> TokenTree:
        return to_token_tree(
            batch, {b: self.draft(batch.requests[b], batch.max_draft_nodes[b]) for b in batch.find_drafting()}
        )

    def draft(self, request: Request, budget: int) -> Draft:
        """Draft at most `budget` nodes for one request."""
        state = self._update_state(request)
        depth = min(self.num_speculative_tokens, budget, request.max_draft_depth)
        return self.draft_tokens(state, request, depth, budget) if depth > 0 else Draft()

    def match_strength(self, request: Request) -> int:
        """Return `state_match_strength` of a request whose draft was just made."""
        return self.state_match_strength(self._states[request.slot])

    def continue_draft(self, request: Request, path: Sequence[int], budget: int) -> Draft:
        """Draft at most `budget` nodes below the last token of `path`."""
        depth = min(self.num_speculative_tokens, budget, request.max_draft_depth - len(path))
        return self.continue_tokens(self._update_state(request), request, path, depth, budget) if depth > 0 else Draft()

    def _update_state(self, request: Request) -> L:
        state = self._states.get(request.slot)
        if state is None:
            state = self._states[request.slot] = self.new_state()
        state.extend(request.get_tokens(len(state.tokens), request.num_tokens))
        return state

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Do nothing: the state reads committed tokens at the next draft."""

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._states.pop(slot, None)
