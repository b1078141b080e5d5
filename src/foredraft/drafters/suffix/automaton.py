"""Suffix automaton with continuation counts, and next-token distributions from its contexts.

A state is a set of strings that end at the same positions of the text; `link` leads to the longest suffix that also
ends elsewhere. Appending a token costs O(1) amortised: it walks up the links and adds a continuation at every state
but the last, and there are at most three continuations per token.

The same walk updates the counts: only the deepest state that already has the continuation counts it again (update
exclusion in PPM). So shorter contexts count *different* longer ones, as in Kneser-Ney smoothing. A distribution that
backs off from context to context is then the one-table approximation of the sequence memoizer. Exact counts of every
substring would cost a walk to the root per token.

This file is the slow reference of kernels/cpu/suffix.c and the fallback without it. Both give equal bits.

Reference: Blumer et al. 1985 (automaton); Wood et al. 2009 and Gasthaus, Wood, Teh 2010 (sequence memoizer).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MAX_CONTEXTS = 6  # contexts that a distribution blends, the longest first
MIN_WEIGHT = 0.02  # remaining probability below which no further context is read
MAX_SCANNED = 16  # continuations read per context, the latest first
MAX_CONTINUATIONS = 64  # different tokens in a distribution
MAX_CONTEXT_LENGTH = 64  # tokens; longer contexts have the same discount
TEXT_BREAK = -1  # separator between texts; never drafted

DiscountTable = array  # of doubles [MAX_CONTEXT_LENGTH + 1], falling


def build_discount_table(discounts: Sequence[float]) -> "DiscountTable[float]":
    """Return the cumulative products of discounts by context length.

    A context of n tokens that backs off to one of m tokens subtracts table[n] / table[m] from every count.

    Args:
        discounts: discounts of contexts of 1, 2, ... tokens; the last one holds for all longer contexts.

    Returns:
        Doubles [MAX_CONTEXT_LENGTH + 1]; entry n is the product of the first n discounts.
    """
    table = array("d", [1.0])
    for n in range(MAX_CONTEXT_LENGTH):
        table.append(table[-1] * discounts[min(n, len(discounts) - 1)])
    return table


class Continuations(NamedTuple):
    """Possible next tokens with probabilities, the likeliest first; equal ones in order of discovery.

    The sum of the probabilities is at most 1; the rest belongs to tokens that never followed.
    """

    tokens: list[int]
    probs: list[float]


class SuffixMatch(NamedTuple):
    """Longest suffix of a sequence that occurs in an automaton: its state and its length in tokens."""

    automaton: "SuffixAutomaton"
    state: int = 0
    length: int = 0


@dataclass(frozen=True)
class RankedDraftSpec:
    """Limits of a draft by rank, which takes the likeliest nodes."""

    max_nodes: int
    max_depth: int
    width: int = 1  # most children of a node
    min_probability: float = 0.0  # least probability of a path
    end_ids: frozenset[int] = frozenset()  # tokens without children


class RankedDraft(NamedTuple):
    """Nodes below a root (node 0), parents before children, with the probabilities of their paths."""

    tokens: list[int]
    parents: list[int]
    path_probs: list[float]


class SuffixAutomaton(Protocol):
    """Interface of an automaton of one growing text, or several with TEXT_BREAK between them."""

    def __len__(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def num_operations(self) -> int:
        """States visited and continuations copied so far: the cost of `extend` as a count."""

    def extend(self, tokens: Sequence[int]) -> None: ...

    def match_end(self) -> SuffixMatch:
        """Return the longest suffix that occurred before in the same text."""

    @staticmethod
    def advance(matches: Sequence[SuffixMatch], tokens: Sequence[int]) -> list[SuffixMatch]:
        """Advance matches by more tokens of the sequence; O(1) amortised per token and match."""

    @staticmethod
    def predict(matches: Sequence[SuffixMatch], discount_table: "DiscountTable[float]") -> Continuations:
        """Blend the contexts of all matches into one distribution of the next token."""

    @staticmethod
    def draft(
        matches: Sequence[SuffixMatch], discount_table: "DiscountTable[float]", spec: RankedDraftSpec
    ) -> RankedDraft:
        """Draft the likeliest paths after the matches."""


class _State:
    __slots__ = ("counts", "length", "link", "targets", "total")

    def __init__(self, length: int, link: int) -> None:
        self.length = length
        self.link = link
        self.total = 0
        self.targets: dict[int, int] = {}  # token -> state
        self.counts: dict[int, int] = {}  # token -> count; the latest is last


class ReferenceAutomaton:
    """Reference implementation with dicts, about 1 kB per token."""

    def __init__(self) -> None:
        self.states = [_State(0, -1)]
        self.last_state = 0
        self.num_operations = 0

    def __len__(self) -> int:
        return self.states[self.last_state].length

    @property
    def num_bytes(self) -> int:
        return 1000 * len(self)

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        states, current = self.states, self.last_state
        new = self._add_state(states[current].length + 1, 0)
        while current >= 0 and token not in states[current].targets:
            state = states[current]
            state.targets[token], state.counts[token] = new, 1
            state.total += 1
            current = state.link
            self.num_operations += 1
        if current >= 0:
            state = states[current]
            state.counts[token] = state.counts.pop(token) + 1
            state.total += 1
            after = state.targets[token]
            is_whole = states[after].length == state.length + 1
            states[new].link = after if is_whole else self._split(current, token, after, new)
        self.last_state = new

    def _split(self, current: int, token: int, after: int, new: int) -> int:
        """Split state `after`: its strings that end at the end of the text become a state of their own."""
        states, old = self.states, self.states[after]
        part = self._add_state(states[current].length + 1, old.link)
        copy = states[part]
        copy.targets, copy.counts, copy.total = dict(old.targets), dict(old.counts), old.total
        self.num_operations += len(copy.targets)
        while current >= 0 and states[current].targets.get(token) == after:
            states[current].targets[token] = part
            current = states[current].link
            self.num_operations += 1
        old.link = part
        return part

    def _add_state(self, length: int, link: int) -> int:
        self.states.append(_State(length, link))
        return len(self.states) - 1

    def match_end(self) -> SuffixMatch:
        link = max(self.states[self.last_state].link, 0)
        return SuffixMatch(self, link, self.states[link].length)

    @staticmethod
    def advance(matches: Sequence[SuffixMatch], tokens: Sequence[int]) -> list[SuffixMatch]:
        found = list(matches)
        for token in tokens:
            found = [_advance_one(match, token) for match in found]
        return found

    @staticmethod
    def predict(matches: Sequence[SuffixMatch], discount_table: "DiscountTable[float]") -> Continuations:
        return _predict(matches, discount_table)

    @staticmethod
    def draft(
        matches: Sequence[SuffixMatch], discount_table: "DiscountTable[float]", spec: RankedDraftSpec
    ) -> RankedDraft:
        result = RankedDraft([], [], [])
        open_: list[tuple[float, int, int]] = []  # path probability, parent, token
        node_matches, depths, probs = [list(matches)], [0], [1.0]
        for node in range(spec.max_nodes):
            if depths[node] < spec.max_depth and (not node or result.tokens[node - 1] not in spec.end_ids):
                continuations = _predict(node_matches[node], discount_table)
                pairs = zip(continuations.tokens[: spec.width], continuations.probs, strict=False)
                open_ += [(probs[node] * prob, node, token) for token, prob in pairs]
            best = max(range(len(open_)), key=lambda i: (open_[i][0], -i), default=-1)
            if best < 0 or open_[best][0] < spec.min_probability:
                break
            prob, parent, token = open_.pop(best)
            result.tokens.append(token)
            result.parents.append(parent)
            result.path_probs.append(prob)
            node_matches.append(ReferenceAutomaton.advance(node_matches[parent], [token]))
            depths.append(depths[parent] + 1)
            probs.append(prob)
        return result


def _get_states(match: SuffixMatch) -> list[_State]:
    text = match.automaton
    assert isinstance(text, ReferenceAutomaton)
    return text.states


def _advance_one(match: SuffixMatch, token: int) -> SuffixMatch:
    states, current, length = _get_states(match), match.state, match.length
    while token not in states[current].targets:
        current = states[current].link
        if current < 0:
            return SuffixMatch(match.automaton)
        length = states[current].length
    return SuffixMatch(match.automaton, states[current].targets[token], length + 1)


def _predict(matches: Sequence[SuffixMatch], discount_table: "DiscountTable[float]") -> Continuations:
    """Blend the contexts of all matches from the longest on; of equal lengths the first match comes first.

    Each context passes the discounted probability to the next one. The rest after the last context is not assigned.
    """
    cursors = [(match.state, match.length) for match in matches]
    found: dict[int, float] = {}
    weight = 1.0
    for _ in range(MAX_CONTEXTS):
        if weight < MIN_WEIGHT:
            break
        s = max(range(len(cursors)), key=lambda i: (cursors[i][1], -i), default=-1)
        if s < 0 or cursors[s][1] < 1:
            break
        states = _get_states(matches[s])
        state, length = states[cursors[s][0]], min(cursors[s][1], MAX_CONTEXT_LENGTH)
        shorter = states[state.link].length
        cursors[s] = (state.link, shorter)
        if state.total:
            discount = discount_table[length] / discount_table[min(shorter, length - 1)]
            share = weight / state.total
            for i, (token, count) in enumerate(reversed(state.counts.items())):
                if i == MAX_SCANNED:
                    break
                if token >= 0 and (token in found or len(found) < MAX_CONTINUATIONS):
                    found[token] = found.get(token, 0.0) + share * (count - discount)
            weight *= discount * len(state.counts) / state.total
    order = sorted(found, key=lambda token: -found[token])
    return Continuations(order, [found[token] for token in order])
