"""How long the drafts of a step may be. Pure: no model, no tensors, no clock of its own.

A length is chosen before anything is drafted and from earlier steps alone: under rejection sampling one that depended
on the drafted tokens would change the law.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Ask:
    """One request that could be drafted for in this step."""

    slot: int
    most: int  # nodes it may have: what is left of its length, of the drafter's size, of its own wish
    is_fixed: bool = False  # the request named its length itself


@dataclass(frozen=True)
class Outcome:
    """What came of one request's draft."""

    slot: int
    budget: int  # nodes it was allowed
    drafted: int  # nodes it had
    accepted: tuple[int, ...] = ()  # those that were kept, 1 = the first node below the root; a chain's are 1, 2, ...


@dataclass(frozen=True)
class StepReport:
    """One step, after the fact."""

    num_requests: int
    num_rows: int  # rows of the target's pass: prompt chunks, last tokens, drafted nodes
    num_scored: int  # rows whose law was made: last tokens and drafted nodes
    context: int  # sum over the rows of the tokens each attended to
    draft_time: float  # seconds the drafter took, reading included
    step_time: float  # seconds of the whole step, drafting included
    outcomes: tuple[Outcome, ...] = ()  # of every request whose last token was scored


class Lengths(Protocol):
    """Who decides how many nodes each request may draft."""

    def allot(self, asks: Sequence[Ask], num_rows: int, context: int = 0) -> list[int]:
        """At most `most` nodes for each; the pass has `num_rows` rows without them, which attend to `context`."""

    def learn(self, report: StepReport) -> None:
        """After every step."""

    def forget(self, slots: Sequence[int]) -> None:
        """These requests are gone."""


class Fixed:
    """Every draft as long as it may be."""

    def allot(self, asks: Sequence[Ask], num_rows: int, context: int = 0) -> list[int]:
        return [ask.most for ask in asks]

    def learn(self, report: StepReport) -> None:
        """Nothing: it never changes."""

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing is kept."""
