"""Where a text stands in another one that it follows, edits apart: for drafts that copy (`aggressive`, `prediction`).

While the two agree there is one place. After an edit the last tokens of the text are looked for in what it follows: the
longest match counts, and of several the nearest to where the text should be. Where nothing fits, the tokens since the
edit stand in for as many others.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LONGEST = 4  # tokens of a match that is as good as having followed all along
PER_MATCH = 2  # tokens drafted for each token of a shorter one
NEAR = 8  # a match of one token counts this close to the place expected, and an edit is this long before it is text


@dataclass
class Follower:
    """One text in its source. Every token is read once, at a cost that does not grow."""

    source: tuple[int, ...]
    place: int = 0  # of the token expected next
    trust: int = LONGEST  # tokens before `place` that agreed, LONGEST at most
    per_match: int = PER_MATCH
    reached: int = 0  # the last place that was beyond doubt: a text goes forward in its source
    num_read: int = 0
    recent: list[int] = field(default_factory=list)  # the last LONGEST tokens read
    _left: int = 0  # the place at which it last went another way
    _places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # n-gram -> places after it, rising

    @classmethod
    def lost(cls, source: tuple[int, ...], recent: Sequence[int], per_match: int = PER_MATCH) -> "Follower":
        """Of a text whose beginning may stand anywhere in its source; `recent` went before it."""
        return cls(source, len(source), 0, per_match, recent=list(recent[-LONGEST:]), _left=len(source))

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            is_same = self.place < len(self.source) and self.source[self.place] == token
            if not is_same and self.trust:
                self._left = self.place
            self.trust = min(self.trust + 1, LONGEST) if is_same else 0
            self.place += 1  # as if one token had been exchanged for another
            if self.trust == LONGEST:
                self.reached = self.place
        self.num_read += len(tokens)
        self.recent = [*self.recent, *tokens][-LONGEST:]

    def draft(self, length: int) -> tuple[int, ...]:
        """At most `length` tokens that should come next; fewer on weak evidence."""
        return next(iter(self.drafts(length, 1)), ())

    def drafts(self, length: int, count: int) -> list[tuple[int, ...]]:
        """At most `count` different ones, the likeliest first; one alone where there is no doubt."""
        if self.trust == 0:
            self.place, self.trust = next(self._matches(), (self.place, 0))
        found: dict[tuple[int, ...], None] = {}
        for place, trust in self._hypotheses():
            bound = length if trust == LONGEST else min(length, self.per_match * max(trust, 1))
            tokens = self.source[place : place + bound]
            if tokens:
                found.setdefault(tokens)
            if len(found) == count or trust == LONGEST:
                break
        return list(found)

    def _hypotheses(self) -> Iterator[tuple[int, int]]:
        """(place, trust): where it stands, or else where it may; first as if tokens had been exchanged one by one, then
        two for one, then put in."""
        if self.trust or self._is_edit:
            yield self.place, self.trust
        if self.trust < LONGEST:
            yield from self._matches()
        if self.trust == 0 and self._is_edit:
            yield self.place + 1, 0
            yield self._left, 0

    @property
    def _is_edit(self) -> bool:
        """Whether it left its source a moment ago: after that nobody can tell where it will be back."""
        return self.place - self._left <= NEAR

    def _matches(self) -> Iterator[tuple[int, int]]:
        """(place, length): the best match of every length, the longest first."""
        if not self._places:
            self._index()
        for n in range(len(self.recent), 0, -1):
            place = self._nearest(self._places.get(tuple(self.recent[-n:]), []))
            if place is not None and (n > 1 or abs(place - self.place) <= NEAR):
                yield place, n

    def _nearest(self, places: Sequence[int]) -> int | None:
        """To the place expected, of those that lie ahead, else of all; the later of two that are as near."""
        first = bisect_left(places, self.reached)
        first = first if first < len(places) else 0
        after = bisect_left(places, self.place, first)
        around = places[max(after - 1, first) : after + 1]
        return min(reversed(around), key=lambda place: abs(place - self.place), default=None)

    def _index(self) -> None:
        """Not before a text leaves its source; most do not."""
        known = self.source[:-1]  # nothing follows the last
        for n in range(1, LONGEST + 1):
            for place, gram in enumerate(zip(*(known[i:] for i in range(n)), strict=False), n):
                self._places.setdefault(gram, []).append(place)
