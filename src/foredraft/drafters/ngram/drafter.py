"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens in the same sequence.

Reference: "Prompt Lookup Decoding" (Saxena 2023) and LLMA (2304.04487). vLLM's `ngram` has the same two bounds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from foredraft.drafters.draft import Draft
from foredraft.drafters.token_drafter import TokenDrafter
from foredraft.request import Request

MATCHES_PER_BRANCH = 8  # occurrences read per branch; most continuations repeat
LEAD_DECAY = 0.97  # decay per case in which the first and the latest occurrence disagree
MIN_LEAD = 8.0  # decayed cases by which the first occurrence must lead to be preferred
ACCURACY_UPDATE_RATE = 0.05  # weight of a new case in the accuracy of a match length
MIN_ACCURACY = 0.6  # accuracy from which a shorter match drafts the full length


@dataclass(frozen=True)
class Config:
    """Bounds of the matches and length of the drafts.

    The longest match wins, and among equals the latest occurrence; or the first, if it predicted this sequence better.

    Attributes:
        prompt_lookup_max: most tokens of a match.
        prompt_lookup_min: fewest tokens of a match.
        tokens_per_match: draft tokens per matched token, for matches shorter than prompt_lookup_max. The limit ends
            when matches of that length predict most tokens of this sequence. With it, single-token matches save time
            on held-out code at any cost of verification; without it they do not.
        branches: number of different continuations in one tree, of num_speculative_tokens each.
    """

    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    tokens_per_match: int = 2
    branches: int = 1


@dataclass
class NgramIndex:
    """Index of the n-grams of one growing sequence. Extending costs O(new tokens).

    Its statistics come from committed tokens alone, so a draft depends on no token that is sampled later.
    """

    config: Config
    tokens: list[int] = field(default_factory=list)
    _positions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # n-gram -> positions after it
    _first_lead: float = 0.0  # decayed cases won by the first occurrence, less those won by the latest
    _accuracy: dict[int, float] = field(default_factory=dict)  # match length -> share of right predictions

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end, longest, found = len(self.tokens), 0, None
            for n in range(self.config.prompt_lookup_min, min(self.config.prompt_lookup_max, end) + 1):
                places = self._positions.setdefault(tuple(self.tokens[end - n :]), [])
                if places:
                    longest, found = n, (places[0], places[-1])
                places.append(end)
            if found is not None:
                self._update_accuracy(longest, self.tokens[found[0]] == token, self.tokens[found[1]] == token)
            self.tokens.append(token)

    def _update_accuracy(self, length: int, is_first_right: bool, is_latest_right: bool) -> None:
        """Record whether the first and the latest occurrence of a match predicted the next token."""
        is_right = is_first_right if self._prefers_first else is_latest_right
        accuracy = self._accuracy.get(length, 0.5)
        self._accuracy[length] = accuracy + ACCURACY_UPDATE_RATE * (is_right - accuracy)
        if is_first_right != is_latest_right:
            self._first_lead = LEAD_DECAY * self._first_lead + is_first_right - is_latest_right

    @property
    def _prefers_first(self) -> bool:
        return self._first_lead > MIN_LEAD

    def _limit_length(self, match_length: int, max_length: int) -> int:
        """Return the draft length that a match justifies, at most `max_length`."""
        if match_length == self.config.prompt_lookup_max or self._accuracy.get(match_length, 0.5) > MIN_ACCURACY:
            return max_length
        return min(max_length, match_length * self.config.tokens_per_match)

    def find_matches(self) -> Iterator[tuple[int, int]]:
        """Yield (match length, position after it), each position once.

        Longest matches come first, then the preferred occurrence, then the latest.
        """
        visited: set[int] = set()
        longest = min(self.config.prompt_lookup_max, len(self.tokens))
        for n in range(longest, self.config.prompt_lookup_min - 1, -1):
            places = self._positions.get(tuple(self.tokens[-n:]), [])
            for place in chain(places[: self._prefers_first], reversed(places)):
                if place not in visited:
                    visited.add(place)
                    yield n, place

    def copy_continuation(self, position: int, length: int) -> tuple[int, ...]:
        """Return `length` tokens from a position on; past the end of the sequence the copy repeats itself."""
        period = len(self.tokens) - position
        once = self.tokens[position : position + length]
        return tuple(once[i % period] for i in range(length))

    @property
    def longest_match(self) -> int:
        """Length of the longest match in tokens."""
        return next((n for n, _ in self.find_matches()), 0)

    def continue_path(self, path: Sequence[int], length: int) -> tuple[int, ...]:
        """Draft as if `path` were committed: from the longest match, and among equals the preferred occurrence."""
        config = self.config
        tail = [*self.tokens[-config.prompt_lookup_max :], *path][-config.prompt_lookup_max :]
        for n in range(len(tail), config.prompt_lookup_min - 1, -1):
            places = self._positions.get(tuple(tail[-n:]))
            if places:
                return self.copy_continuation(places[0 if self._prefers_first else -1], self._limit_length(n, length))
        return ()

    def find_continuations(self, length: int) -> list[tuple[int, ...]]:
        """Return at most `branches` different continuations, the best first."""
        max_branches = self.config.branches
        found: dict[tuple[int, ...], None] = {}
        for n, place in islice(self.find_matches(), max_branches * MATCHES_PER_BRANCH):
            found.setdefault(self.copy_continuation(place, self._limit_length(n, length)))
            if len(found) == max_branches:
                break
        return list(found)


class NgramDrafter(TokenDrafter[NgramIndex]):
    """Drafter of deterministic tokens from the request's own sequence. No draft without a match."""

    def __init__(self, config: Config, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens, num_speculative_tokens * config.branches)
        self.config = config

    def new_state(self) -> NgramIndex:
        return NgramIndex(self.config)

    def draft_tokens(self, state: NgramIndex, request: Request, depth: int, budget: int) -> Draft:
        return Draft.from_paths(state.find_continuations(depth), budget)

    def state_match_strength(self, state: NgramIndex) -> int:
        return state.longest_match

    def continue_tokens(
        self, state: NgramIndex, request: Request, path: Sequence[int], depth: int, budget: int
    ) -> Draft:
        return Draft.from_chain(state.continue_path(path, depth))
