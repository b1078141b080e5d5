"""Draft lengths of a drafter that decides by itself: all it may have, as long as it wins what it costs."""

from collections.abc import Sequence

from foredraft.controller import START, Adaptive, Ask, Decision, Reason
from foredraft.costs import CostCurve

MEASURE = 256  # steps with drafts between plain ones
LOAN = 4.0  # plain steps that requests of a kind may lose before they have won anything
RETURN = 1.0  # plain steps' worth in the purse that drafting begins again with
MOST_RETURN = 8.0  # twice as much after every time that it failed again, up to this


class Watched(Adaptive):
    """The purse of `Adaptive` without its plan: a composition weighs every draft against its price, with more to go by
    (who drafts, and how much speaks for it) than survival by node. What is left to do from outside is to see that it
    does win time. Where it does not, requests of the kinds that drafted rest until the purse has filled again."""

    def __init__(self, curve: CostCurve | None = None) -> None:
        super().__init__(curve)
        self._start = len(START)  # nothing has to be found out
        self._resting: set[int] = set()  # kinds
        self._return: dict[int, float] = {}  # by kind that has failed: what it next comes back with
        self._drafting: frozenset[int] = frozenset()  # kinds, in the step before

    def allot(self, asks: Sequence[Ask], num_rows: int, context: int = 0) -> list[int]:
        self._asked, self._has_fixed = len(asks), any(ask.is_fixed for ask in asks)
        self._load = len(asks)
        self._judge()
        reason: Reason = "measure" if self._since_plain >= MEASURE else "pays"
        free = () if reason == "measure" else {ask.kind for ask in asks if not ask.is_fixed} - self._resting
        granted = [ask.most if ask.is_fixed or ask.kind in free else 0 for ask in asks]
        self._drafting, self._on = frozenset(free), bool(free)
        reason = reason if free or reason == "measure" else "guard"
        self.decision = Decision(reason, sum(granted), max(granted, default=0))
        self.counts[reason] += 1
        return granted

    def _judge(self) -> None:
        """Who drafted while the purse ran empty rests; who rests comes back when it has filled."""
        for kind in self._drafting:
            allowed = 0.0 if kind in self._return else -LOAN * self._plain
            if self._purse < allowed:
                self._resting.add(kind)
                self._return[kind] = min(2 * self._return.get(kind, RETURN / 2), MOST_RETURN)
            elif self._purse > MOST_RETURN * self._plain:
                self._return.pop(kind, None)
        self._resting -= {kind for kind in self._resting if self._purse > self._return[kind] * self._plain}
