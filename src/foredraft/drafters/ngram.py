"""Prompt lookup: what followed the last few tokens the last time they occurred in this very text.

After "Prompt Lookup Decoding" (Saxena 2023) and LLMA (2304.04487); vLLM's `ngram` takes the same two bounds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from foredraft.drafters.base import Context, Draft, TextDrafter
from foredraft.errors import ForedraftError
from foredraft.request import Request

METHOD = "ngram"
READS_MODEL = False
AUTO_RANK = 10  # among the methods that read nothing but the text; more is better
SCANNED_PER_BRANCH = 8  # earlier occurrences looked at for each continuation wanted; most repeat one another
FADE = 0.97  # of what one more case says, where the first and the latest occurrence disagreed
MARGIN = 8.0  # cases by which the first occurrence has to be ahead of the latest, the newest counting most
LEARNING = 0.05  # share of one more case in how often matches of a length are right
TRUSTED = 0.6  # matches of a length that are right so often draft as the longest do


@dataclass(frozen=True)
class Config:
    """The longest match of prompt_lookup_max .. prompt_lookup_min tokens counts, and of several the latest; the first,
    in a text whose own tokens so far were foretold better by the first.

    A match shorter than the longest is weak evidence: it drafts `tokens_per_match` tokens for each of its own, until
    matches of its length foretold most tokens of this text. (On held-out code single-token matches then pay at any cost
    of verification, and do not without that bound.)
    `branches`: this many different continuations, of num_speculative_tokens each, share one tree.
    """

    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    tokens_per_match: int = 2
    branches: int = 1


@dataclass
class Index:
    """Where every n-gram of one growing text was followed by what. Extending costs O(new tokens).

    What is learnt of the text, its prompt included, comes from tokens that are committed, so a draft depends on nothing
    that is sampled after it.
    """

    config: Config
    tokens: list[int] = field(default_factory=list)
    _places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # n-gram -> places of the token after it
    _lead: float = 0.0  # cases, fading, in which the first occurrence was right and the latest wrong, less the others
    _right: dict[int, float] = field(default_factory=dict)  # length of a match -> share of them that were right

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            here, longest, found = len(self.tokens), 0, None
            for n in range(self.config.prompt_lookup_min, min(self.config.prompt_lookup_max, here) + 1):
                places = self._places.setdefault(tuple(self.tokens[here - n :]), [])
                if places:
                    longest, found = n, (places[0], places[-1])
                places.append(here)
            if found is not None:
                self._learn(longest, self.tokens[found[0]] == token, self.tokens[found[1]] == token)
            self.tokens.append(token)

    def _learn(self, length: int, is_first_right: bool, is_latest_right: bool) -> None:
        """A token came after a match of `length` tokens, and one occurrence or the other had foretold it."""
        is_right = is_first_right if self._takes_first else is_latest_right
        share = self._right.get(length, 0.5)
        self._right[length] = share + LEARNING * (is_right - share)
        if is_first_right != is_latest_right:
            self._lead = FADE * self._lead + is_first_right - is_latest_right

    @property
    def _takes_first(self) -> bool:
        return self._lead > MARGIN

    def _bound(self, matched: int, length: int) -> int:
        """Tokens that a match is worth, of `length` at most."""
        if matched == self.config.prompt_lookup_max or self._right.get(matched, 0.5) > TRUSTED:
            return length
        return min(length, matched * self.config.tokens_per_match)

    def matches(self) -> Iterator[tuple[int, int]]:
        """(length of the match, place after it): longest first, then the better occurrence, then latest first, each
        place once."""
        seen: set[int] = set()
        longest = min(self.config.prompt_lookup_max, len(self.tokens))
        for n in range(longest, self.config.prompt_lookup_min - 1, -1):
            places = self._places.get(tuple(self.tokens[-n:]), [])
            for place in chain(places[: self._takes_first], reversed(places)):
                if place not in seen:
                    seen.add(place)
                    yield n, place

    def continuation(self, place: int, length: int) -> tuple[int, ...]:
        """`length` tokens from a place on; past the end of the text it goes on with itself, as a loop does."""
        period = len(self.tokens) - place
        once = self.tokens[place : place + length]
        return tuple(once[i % period] for i in range(length))

    @property
    def longest(self) -> int:
        """Tokens of the longest match."""
        return next((n for n, _ in self.matches()), 0)

    def below(self, path: Sequence[int], length: int) -> tuple[int, ...]:
        """What would come next if `path` had followed: after the longest match, and of several the better one."""
        config = self.config
        tail = [*self.tokens[-config.prompt_lookup_max :], *path][-config.prompt_lookup_max :]
        for n in range(len(tail), config.prompt_lookup_min - 1, -1):
            places = self._places.get(tuple(tail[-n:]))
            if places:
                return self.continuation(places[0 if self._takes_first else -1], self._bound(n, length))
        return ()

    def continuations(self, length: int) -> list[tuple[int, ...]]:
        """At most `branches` different ones, best first."""
        wanted = self.config.branches
        found: dict[tuple[int, ...], None] = {}
        for n, place in islice(self.matches(), wanted * SCANNED_PER_BRANCH):
            found.setdefault(self.continuation(place, self._bound(n, length)))
            if len(found) == wanted:
                break
        return list(found)


class Ngram(TextDrafter[Index]):
    """Guesses from the request's own tokens; q is one-hot. No match, no draft."""

    def __init__(self, config: Config, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.config = config

    @property
    def num_nodes(self) -> int:
        return self.num_tokens * self.config.branches

    def start(self) -> Index:
        return Index(self.config)

    def draft(self, learnt: Index, request: Request, depth: int, budget: int) -> Draft:
        return Draft.merged(learnt.continuations(depth), budget)

    def weigh(self, learnt: Index) -> int:
        return learnt.longest

    def extend(self, learnt: Index, request: Request, path: Sequence[int], depth: int, budget: int) -> Draft:
        return Draft.chain(learnt.below(path, depth))


def create(config: Config, context: Context) -> Ngram:
    """Raises ForedraftError for bounds no n-gram can meet."""
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if not 1 <= low <= high:
        raise ForedraftError(f"prompt_lookup_min ({low}) must lie in 1..prompt_lookup_max ({high})")
    for name in ("branches", "tokens_per_match"):
        if getattr(config, name) < 1:
            raise ForedraftError(f"{name} must be at least 1, got {getattr(config, name)}")
    return Ngram(config, context.num_tokens)
