"""What a composition is made of: its parts, the drafts they propose in a step, and what becomes of those."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from foredraft.drafters.base import Draft, Drafter, TextDrafter, TextPart
from foredraft.drafters.choice import Offer
from foredraft.drafters.merging import Joint
from foredraft.drafters.probation import Clock, Probation
from foredraft.drafters.witness import Witness, attempt
from foredraft.drafters.worth import Key
from foredraft.request import Request
from foredraft.tree import TokenTree

T = TypeVar("T")
MOST_WEIGHT = 12  # of what speaks for a draft: more is no better


@dataclass(eq=False)
class Part:
    """One drafter of a composition."""

    name: str
    drafter: Drafter
    guarded: Drafter  # the same, failing alone
    columns: list[int] = field(default_factory=list)  # which of all boundaries it sees
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        self.probation = Probation(self.name, self.clock)  # of a text part, which no guard stands before
        self._witness = Witness()
        self.is_text = isinstance(self.drafter, TextPart) and not self.drafter.taps
        # one that keeps nothing of what it sees is not shown it
        self.observes = getattr(type(self.drafter), "observe", None) is not TextDrafter.observe

    @property
    def probations(self) -> tuple[Probation, ...]:
        """Of its calls here, and of those behind its guard."""
        return (self.probation, *getattr(self.guarded, "probations", ()))

    @property
    def text(self) -> TextPart | None:
        """The drafter, if it reads nothing but the text and does not rest."""
        return self.drafter if self.is_text and not self.probation.is_resting else None  # type: ignore[return-value]

    @property
    def num_nodes(self) -> int:
        if self.is_text:
            return 0 if self.probation.is_resting else self.drafter.num_nodes
        return self.guarded.num_nodes

    def offer(self, i: int, request: Request, budget: int) -> Offer | None:
        """What it drafts from the text, as the i-th part; None for nothing."""
        text, most = self.text, min(budget, self.num_nodes)
        if text is None or most <= 0:
            return None
        found = self.ask("draft", request, lambda: _weighed(text, request, most))
        if found is None:
            return None
        draft, weight = found
        if not draft.tokens:
            return None
        is_drawn = draft.q is not None
        size = most if is_drawn else len(draft.tokens)
        return Offer(draft, (i, weight), (i,), size, most if is_drawn else _depth(draft.parents), is_drawn)

    def ask(self, verb: str, request: Request, call: Callable[[], T]) -> T | None:
        """What a call of the text part returns; None where it failed."""
        return attempt(self.probation, self._witness.note((request,)), verb, call, is_timed=True)

    def forget(self, slots: Sequence[int]) -> None:
        self.guarded.forget(slots)
        self._witness.forget(slots)


@dataclass(slots=True)
class Trial:
    """A draft as it was proposed, and whose estimate it counts for."""

    key: Key
    tokens: Sequence[int]  # [n] below the root
    parents: Sequence[int]


@dataclass(slots=True)
class Step:
    """What was proposed for one request: filled by propose, read by observe."""

    trials: list[Trial] = field(default_factory=list)
    pairs: list[tuple[Key, int, int]] = field(default_factory=list)  # trials whose union counts too
    tail: Key | None = None  # of the extension...
    path: tuple[int, ...] = ()  # ... below this path
    tail_tokens: tuple[int, ...] = ()

    def tries(self, key: Key, tokens: Sequence[int], parents: Sequence[int]) -> int:
        self.trials.append(Trial(key, tokens, parents))
        return len(self.trials) - 1


def together(offers: Sequence[Offer], budget: int) -> Offer:
    """Guesses of several text parts as one tree."""
    joint = Joint.bare(0)
    for offer in offers:
        joint.graft(offer.draft, budget)
    parts = tuple(i for offer in offers for i in offer.parts)
    draft = Draft(tuple(joint.tokens[1:]), tuple(joint.parents[1:]))
    key = parts, max(offer.key[1] for offer in offers)
    return Offer(draft, key, parts, joint.size, max(offer.depth for offer in offers), False)


def alone(draft: Draft, root: int) -> Joint:
    """One request's draft, with its q."""
    return Joint.of(TokenTree([[root, *draft.tokens]], [[-1, *draft.parents]], draft.q), 0, 0)


def _weighed(text: TextPart, request: Request, most: int) -> tuple[Draft, int]:
    draft = text.drafted(request, most)
    return draft, min(text.weighed(request), MOST_WEIGHT) if draft.tokens else 0


def _depth(parents: Sequence[int]) -> int:
    """Of a draft by its parents, which count from the root."""
    if parents[-1] == len(parents) - 1 and tuple(parents) == tuple(range(len(parents))):
        return len(parents)
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)


def fate(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> tuple[int, int]:
    """How deep a draft agrees with the text that came, and how many of its levels were put to the test."""
    node, kept, has_more = 0, 0, False
    for i, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
        if parent != node:
            continue
        if kept == len(text):
            return kept, kept
        has_more = True
        if token == text[kept]:
            node, kept, has_more = i, kept + 1, False
    return kept, kept + has_more
