"""Position of an output in a source that it copies with edits, for `aggressive` and predicted outputs.

While output and source agree, the position is certain. After an edit the last output tokens are searched in the source:
the longest match wins, and among equals the nearest to the expected position. Without a match, each token since the
edit is taken as a replacement of one source token.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

FULL_MATCH = 4  # tokens of a match that makes the position certain
TOKENS_PER_MATCH = 2  # tokens drafted per token of a shorter match
# tokens: a one-token match counts within this distance of the expected position, and an edit is at most this long
MAX_EDIT_DISTANCE = 8


@dataclass
class CopyCursor:
    """Position of one output in its source. Each output token is read once, at constant cost."""

    source: tuple[int, ...]
    position: int = 0  # of the next expected token
    num_matched: int = FULL_MATCH  # source tokens before `position` that agree, at most FULL_MATCH
    tokens_per_match: int = TOKENS_PER_MATCH
    confirmed_position: int = 0  # last certain position; later positions are preferred
    num_read: int = 0
    recent_tokens: list[int] = field(default_factory=list)  # last FULL_MATCH tokens read
    _diverged_at: int = 0  # position of the last divergence
    # n-gram -> rising positions after it
    _ngram_positions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def from_unknown_position(
        cls, source: tuple[int, ...], recent_tokens: Sequence[int], tokens_per_match: int = TOKENS_PER_MATCH
    ) -> "CopyCursor":
        """Make a cursor for an output that may begin anywhere in its source, after `recent_tokens`."""
        return cls(
            source,
            len(source),
            0,
            tokens_per_match,
            recent_tokens=list(recent_tokens[-FULL_MATCH:]),
            _diverged_at=len(source),
        )

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            is_same = self.position < len(self.source) and self.source[self.position] == token
            if not is_same and self.num_matched:
                self._diverged_at = self.position
            self.num_matched = min(self.num_matched + 1, FULL_MATCH) if is_same else 0
            self.position += 1  # a divergence counts as the replacement of one token
            if self.num_matched == FULL_MATCH:
                self.confirmed_position = self.position
        self.num_read += len(tokens)
        self.recent_tokens = [*self.recent_tokens, *tokens][-FULL_MATCH:]

    def draft(self, length: int) -> tuple[int, ...]:
        """Draft at most `length` tokens; fewer after a short match."""
        return next(iter(self.draft_branches(length, 1)), ())

    def draft_branches(self, length: int, max_branches: int) -> list[tuple[int, ...]]:
        """Draft at most `max_branches` different continuations, the likeliest first; one if the position is certain."""
        if self.num_matched == 0:
            self.position, self.num_matched = next(self._find_matches(), (self.position, 0))
        found: dict[tuple[int, ...], None] = {}
        for position, num_matched in self._list_positions():
            max_length = (
                length if num_matched == FULL_MATCH else min(length, self.tokens_per_match * max(num_matched, 1))
            )
            tokens = self.source[position : position + max_length]
            if tokens:
                found.setdefault(tokens)
            if len(found) == max_branches or num_matched == FULL_MATCH:
                break
        return list(found)

    def _list_positions(self) -> Iterator[tuple[int, int]]:
        """Yield possible (position, matched tokens), the likeliest first.

        Near an edit without a match: one token replaced, then one source token deleted, then tokens inserted.
        """
        if self.num_matched or self._is_near_edit:
            yield self.position, self.num_matched
        if self.num_matched < FULL_MATCH:
            yield from self._find_matches()
        if self.num_matched == 0 and self._is_near_edit:
            yield self.position + 1, 0
            yield self._diverged_at, 0

    @property
    def _is_near_edit(self) -> bool:
        """Whether the last divergence is near; farther from it the expected position is meaningless."""
        return self.position - self._diverged_at <= MAX_EDIT_DISTANCE

    def _find_matches(self) -> Iterator[tuple[int, int]]:
        """Yield (position, length) of the best match of every length, the longest first."""
        if not self._ngram_positions:
            self._index_source()
        for n in range(len(self.recent_tokens), 0, -1):
            position = self._find_nearest(self._ngram_positions.get(tuple(self.recent_tokens[-n:]), []))
            if position is not None and (n > 1 or abs(position - self.position) <= MAX_EDIT_DISTANCE):
                yield position, n

    def _find_nearest(self, positions: Sequence[int]) -> int | None:
        """Return the position nearest to the expected one; the later of two equally near.

        Positions before `confirmed_position` count only if there is no later one.
        """
        first = bisect_left(positions, self.confirmed_position)
        first = first if first < len(positions) else 0
        after = bisect_left(positions, self.position, first)
        nearest = positions[max(after - 1, first) : after + 1]
        return min(reversed(nearest), key=lambda position: abs(position - self.position), default=None)

    def _index_source(self) -> None:
        """Index the n-grams of the source, on the first divergence; most outputs have none."""
        tokens = self.source[:-1]  # no token follows the last one
        for n in range(1, FULL_MATCH + 1):
            for position, gram in enumerate(zip(*(tokens[i:] for i in range(n)), strict=False), n):
                self._ngram_positions.setdefault(gram, []).append(position)
