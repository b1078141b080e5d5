"""Draft lengths of a drafter that decides by itself: all it may have, as long as it wins what it costs."""

from collections.abc import Sequence

from foredraft.controller import START, Adaptive, Ask, Decision, Reason
from foredraft.costs import CostCurve

MEASURE = 256  # steps with drafts between plain ones
RETURN = 6.0  # plain steps' worth in the purse that drafting begins again with
MOST_RETURN = 20.0  # twice as much after every time that it failed again, up to this


class Watched(Adaptive):
    """The purse of `Adaptive` without its plan: a composition weighs every draft against its price, with more to go by
    (who drafts, and how much speaks for it) than survival by node. What is left to do from outside is to see that it
    does win time, and to let nobody draft for a while where it does not."""

    def __init__(self, curve: CostCurve | None = None) -> None:
        super().__init__(curve)
        self._start = len(START)  # nothing has to be found out
        self._return = RETURN

    def allot(self, asks: Sequence[Ask], num_rows: int, context: int = 0) -> list[int]:
        self._asked, self._has_fixed = len(asks), any(ask.is_fixed for ask in asks)
        self._load = len(asks)
        reason = self._reason()
        is_free = reason == "pays"
        granted = [ask.most if ask.is_fixed or is_free else 0 for ask in asks]
        self.decision = Decision(reason, sum(granted), max(granted, default=0))
        self.counts[reason] += 1
        return granted

    def _reason(self) -> Reason:
        if self._on and self._purse < self._floor:
            self._on, self._return = False, min(2 * self._return, MOST_RETURN)
        elif not self._on and self._purse > self._return * self._plain:
            self._on = True
        elif self._purse > MOST_RETURN * self._plain:
            self._return = RETURN
        if not self._on:
            return "guard"
        return "measure" if self._since_plain >= MEASURE else "pays"
