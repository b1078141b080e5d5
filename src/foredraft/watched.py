"""Draft lengths of a drafter that decides by itself: all it may have, as long as it wins what it costs."""

from collections.abc import Sequence

from foredraft.controller import START, Adaptive, Ask, Decision, Reason
from foredraft.costs import CostCurve

MEASURE = 256  # steps with drafts between plain ones
LOAN = 12.0  # plain steps that may be lost before anything has been won
RETURN = 2.0  # plain steps' worth in the purse that drafting begins again with
MOST_RETURN = 8.0  # twice as much after every time that it failed again, up to this


class Watched(Adaptive):
    """The purse of `Adaptive` without its plan, while all texts are greedy.

    A composition weighs every draft against its price, with more to go by (who drafts, and how much speaks for it) than
    survival by node. What is left to do from outside is to see that it does win time, and to let nobody draft for a
    while where it does not. Drawn texts are planned for: what it costs to draw a draft is no part of what it weighs.
    """

    def __init__(self, curve: CostCurve | None = None) -> None:
        super().__init__(curve)
        self._is_resting, self._return = False, 0.0

    def allot(self, asks: Sequence[Ask], num_rows: int, context: int = 0) -> list[int]:
        if any(ask.kind for ask in asks):
            return super().allot(asks, num_rows, context)
        self._start = len(START)  # nothing has to be found out
        self._asked, self._has_fixed = len(asks), any(ask.is_fixed for ask in asks)
        self._load = len(asks)
        self._meet(asks)
        self._judge()
        self._on = not self._is_resting
        reason: Reason = "guard" if self._is_resting else "measure" if self._since_plain >= MEASURE else "pays"
        granted = [ask.most if ask.is_fixed or reason == "pays" else 0 for ask in asks]
        self.decision = Decision(reason, sum(granted), max(granted, default=0))
        self.counts[reason] += 1
        return granted

    def _judge(self) -> None:
        """It rests when the purse is empty, and comes back when that has filled again."""
        if self._is_resting:
            self._is_resting = self._purse <= self._return * self._plain
        elif self._purse < (0.0 if self._return else -LOAN * self._plain):
            self._is_resting, self._return = True, min(max(2 * self._return, RETURN), MOST_RETURN)
        elif self._purse > MOST_RETURN * self._plain:
            self._return = 0.0
