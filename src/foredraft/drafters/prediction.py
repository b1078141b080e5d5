"""Predicted outputs: a request says what its output is expected to be (a file before a small edit), and drafts copy it.

From the beginning of the prediction, for as long as the output follows it; after a divergence from where the last few
tokens of the output occur in it again, as prompt lookup finds them (see ngram.py).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from foredraft.drafters.base import Draft, plant
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

LONGEST = 4  # tokens of a match that is as good as having followed all along
PER_MATCH = 2  # tokens drafted for each token of a shorter one


@dataclass
class Follower:
    """Where one output stands in its prediction. Every token is read once, at a cost that does not grow."""

    prediction: tuple[int, ...]
    place: int = 0  # of the token expected next
    trust: int = LONGEST  # tokens before `place` that agreed, LONGEST at most
    reached: int = 0  # the last place that was beyond doubt: an output goes forward in its prediction
    num_read: int = 0
    recent: list[int] = field(default_factory=list)  # the last LONGEST tokens read
    _places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)  # n-gram -> places after it, rising

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            is_same = self.place < len(self.prediction) and self.prediction[self.place] == token
            self.trust = min(self.trust + 1, LONGEST) if is_same else 0
            self.place += 1  # as if one token had been exchanged for another
            if self.trust == LONGEST:
                self.reached = self.place
        self.num_read += len(tokens)
        self.recent = [*self.recent, *tokens][-LONGEST:]

    def draft(self, length: int) -> tuple[int, ...]:
        """At most `length` tokens that should come next; fewer on weak evidence."""
        if self.trust == 0:
            self._find()
        if self.trust < LONGEST:
            length = min(length, PER_MATCH * max(self.trust, 1))
        return self.prediction[self.place : self.place + length]

    def _find(self) -> None:
        """The longest match, and of several the first that lies ahead, else the last of all."""
        if not self._places:
            self._index()
        for n in range(len(self.recent), 0, -1):
            places = self._places.get(tuple(self.recent[-n:]))
            if places:
                ahead = bisect_left(places, self.reached)
                self.place, self.trust = places[min(ahead, len(places) - 1)], n
                return

    def _index(self) -> None:
        """Not before an output leaves its prediction; most do not."""
        for n in range(1, LONGEST + 1):
            for place in range(n, len(self.prediction)):
                self._places.setdefault(self.prediction[place - n : place], []).append(place)


class Prediction:
    """The verbs. Nothing for requests without a prediction, and no room asked for while there is none."""

    taps: tuple[int, ...] = ()

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._followers: dict[int, Follower] = {}  # by slot

    @property
    def num_nodes(self) -> int:
        return self.num_tokens if self._followers else 0

    def propose(self, batch: Batch) -> TokenTree:
        drafts = [Draft()] * len(batch)
        for b in batch.drafting():
            request = batch.requests[b]
            follower = self._followers.get(request.slot)
            length = min(self.num_tokens, batch.budgets[b], request.room)
            if follower is not None and length > 0:
                follower.read(request.output[follower.num_read :])
                drafts[b] = Draft.chain(follower.draft(length))
        return plant(batch, drafts)

    def observe(self, batch: Batch, commit: Commit) -> None:
        for request in batch.requests:
            if request.prediction and self._is_new(request):
                self._followers[request.slot] = Follower(request.prediction)

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._followers.pop(slot, None)

    def _is_new(self, request: Request) -> bool:
        follower = self._followers.get(request.slot)
        is_same = follower is not None and follower.prediction is request.prediction
        return not is_same or follower.num_read > len(request.output)  # type: ignore[union-attr]
