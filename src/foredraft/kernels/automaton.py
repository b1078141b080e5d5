"""What followed the longest known beginning of what comes next: a suffix automaton with counts, and laws made from it.

The automaton is that of Blumer et al. (1985), built online: a state is a set of strings that end at the same places of
the text, `link` leads to the longest suffix that also ends elsewhere. Appending a token costs O(1) amortised: the walk
up the links that it takes adds a continuation at every state but the last, and there are at most three per token.

That very walk counts: the deepest state that already knew the continuation counts it once more, and no state above it
does. PPM calls this update exclusion; shorter contexts then count *different* longer ones, as in Kneser-Ney, and a law
that backs off from context to context is the one-table approximation of the sequence memoizer (Wood et al. 2009;
Gasthaus, Wood, Teh 2010). Exact counts of every substring would cost a walk to the root for every token.

This is the slow reference of kernels/cpu/suffix.c, and what runs where that was not built. Both give the same bits.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

CONTEXTS = 6  # that a law looks at, the longest first...
LEAST = 0.02  # ... while at least this much of it is unsaid
SCANNED = 16  # continuations of each, the latest first
MOST = 64  # different continuations of a law
LONGEST = 64  # beyond this length all contexts are equally good
BREAK = -1  # stands between texts; never drafted

Trust = array  # of doubles [LONGEST + 1], falling: see `trust`


def trust(discounts: Sequence[float]) -> "Trust[float]":
    """[LONGEST + 1] the product of the discounts of the first n lengths; the last discount is that of all that follow.

    A context of n tokens that backs off to one of m takes the product of the discounts between off every count: the
    further apart they are, the longer nothing else has followed.
    """
    table = array("d", [1.0])
    for n in range(LONGEST):
        table.append(table[-1] * discounts[min(n, len(discounts) - 1)])
    return table


class Law(NamedTuple):
    """Continuations, the likeliest first; equal ones in the order they were met. Chances add up to at most one: what
    is missing is the chance of something never seen here."""

    tokens: list[int]
    chances: list[float]


class Place(NamedTuple):
    """Where a text stands in an automaton: its longest suffix that occurs there, `length` tokens of state `state`."""

    text: "Automaton"
    state: int = 0
    length: int = 0


@dataclass(frozen=True)
class Shape:
    """What a draft by rank may become: the `nodes` likeliest, at most `width` below each, none less likely than `bar`,
    nothing beyond an end of text."""

    nodes: int
    depth: int
    width: int = 1
    bar: float = 0.0
    ends: frozenset[int] = frozenset()


class Grown(NamedTuple):
    """Nodes below a root (node 0), parents before children; `chances` are those of the paths down to them."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]


class Automaton(Protocol):
    """One growing text, or several with BREAK between them."""

    def __len__(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def work(self) -> int:
        """States visited and continuations copied so far: the cost of `extend`, without a clock."""

    def extend(self, tokens: Sequence[int]) -> None: ...

    def end(self) -> Place:
        """The longest suffix that occurred before in the same text."""

    @staticmethod
    def follow(places: Sequence[Place], tokens: Sequence[int]) -> list[Place]:
        """Where the text stands after more of its tokens; O(1) amortised for each."""

    @staticmethod
    def law(places: Sequence[Place], trust: "Trust[float]") -> Law: ...

    @staticmethod
    def draft(places: Sequence[Place], trust: "Trust[float]", shape: Shape) -> Grown: ...


class _State:
    __slots__ = ("counts", "length", "link", "targets", "total")

    def __init__(self, length: int, link: int) -> None:
        self.length = length
        self.link = link
        self.total = 0
        self.targets: dict[int, int] = {}  # token -> state
        self.counts: dict[int, int] = {}  # the latest last


class SlowAutomaton:
    """The reference: dicts, about a kilobyte per token."""

    def __init__(self) -> None:
        self.states = [_State(0, -1)]
        self.last = 0
        self.work = 0

    def __len__(self) -> int:
        return self.states[self.last].length

    @property
    def num_bytes(self) -> int:
        return 1000 * len(self)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        states, here = self.states, self.last
        new = self._add(states[here].length + 1, 0)
        while here >= 0 and token not in states[here].targets:
            state = states[here]
            state.targets[token], state.counts[token] = new, 1
            state.total += 1
            here = state.link
            self.work += 1
        if here >= 0:
            state = states[here]
            state.counts[token] = state.counts.pop(token) + 1
            state.total += 1
            after = state.targets[token]
            is_whole = states[after].length == state.length + 1
            states[new].link = after if is_whole else self._split(here, token, after, new)
        self.last = new

    def _split(self, here: int, token: int, after: int, new: int) -> int:
        """The strings of `after` that end where the text now ends become a state of their own."""
        states, old = self.states, self.states[after]
        part = self._add(states[here].length + 1, old.link)
        copy = states[part]
        copy.targets, copy.counts, copy.total = dict(old.targets), dict(old.counts), old.total
        self.work += len(copy.targets)
        while here >= 0 and states[here].targets.get(token) == after:
            states[here].targets[token] = part
            here = states[here].link
            self.work += 1
        old.link = part
        return part

    def _add(self, length: int, link: int) -> int:
        self.states.append(_State(length, link))
        return len(self.states) - 1

    def end(self) -> Place:
        link = max(self.states[self.last].link, 0)
        return Place(self, link, self.states[link].length)

    @staticmethod
    def follow(places: Sequence[Place], tokens: Sequence[int]) -> list[Place]:
        found = list(places)
        for token in tokens:
            found = [_step(place, token) for place in found]
        return found

    @staticmethod
    def law(places: Sequence[Place], trust: "Trust[float]") -> Law:
        return _law(places, trust)

    @staticmethod
    def draft(places: Sequence[Place], trust: "Trust[float]", shape: Shape) -> Grown:
        grown = Grown([], [], [])
        open_: list[tuple[float, int, int]] = []  # chance, parent, token
        at, depths, chances = [list(places)], [0], [1.0]
        for node in range(shape.nodes):
            if depths[node] < shape.depth and (not node or grown.tokens[node - 1] not in shape.ends):
                law = _law(at[node], trust)
                pairs = zip(law.tokens[: shape.width], law.chances, strict=False)
                open_ += [(chances[node] * chance, node, token) for token, chance in pairs]
            best = max(range(len(open_)), key=lambda i: (open_[i][0], -i), default=-1)
            if best < 0 or open_[best][0] < shape.bar:
                break
            chance, parent, token = open_.pop(best)
            grown.tokens.append(token)
            grown.parents.append(parent)
            grown.chances.append(chance)
            at.append(SlowAutomaton.follow(at[parent], [token]))
            depths.append(depths[parent] + 1)
            chances.append(chance)
        return grown


def _states(place: Place) -> list[_State]:
    text = place.text
    assert isinstance(text, SlowAutomaton)
    return text.states


def _step(place: Place, token: int) -> Place:
    states, here, length = _states(place), place.state, place.length
    while token not in states[here].targets:
        here = states[here].link
        if here < 0:
            return Place(place.text)
        length = states[here].length
    return Place(place.text, states[here].targets[token], length + 1)


def _law(places: Sequence[Place], trust: "Trust[float]") -> Law:
    """Contexts of all the texts from the longest on, the first text's before others of equal length; each passes on
    what its discounts take, and the last one's share stays unsaid. trust: [LONGEST + 1] falling, its quotient at two
    lengths is the discount of a context of one length that backs off to the other."""
    cursors = [(place.state, place.length) for place in places]
    found: dict[int, float] = {}
    weight = 1.0
    for _ in range(CONTEXTS):
        if weight < LEAST:
            break
        s = max(range(len(cursors)), key=lambda i: (cursors[i][1], -i), default=-1)
        if s < 0 or cursors[s][1] < 1:
            break
        states = _states(places[s])
        state, length = states[cursors[s][0]], min(cursors[s][1], LONGEST)
        shorter = states[state.link].length
        cursors[s] = (state.link, shorter)
        if state.total:
            discount = trust[length] / trust[min(shorter, length - 1)]
            share = weight / state.total
            for i, (token, count) in enumerate(reversed(state.counts.items())):
                if i == SCANNED:
                    break
                if token >= 0 and (token in found or len(found) < MOST):
                    found[token] = found.get(token, 0.0) + share * (count - discount)
            weight *= discount * len(state.counts) / state.total
    order = sorted(found, key=lambda token: -found[token])
    return Law(order, [found[token] for token in order])
