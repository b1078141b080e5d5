"""Which request made a step fail: those of its batch run again, one at a time."""

from collections.abc import Collection, Iterable, Sequence

from foredraft.request import Request

MAX_RESETS = 3  # failed steps in a row, without a token between them, until the engine itself may be to blame
RELIEF = 256  # steps without a failure until more requests run together again


class Suspects:
    """After a failed step its requests run alone, one after another, until each has a new token.

    One that fails alone is the culprit. Between two culprits the others take a step, which shows that the engine is
    sound. Where nobody fails alone, it was the number that did it (memory): half as many run together for a while.
    Where everybody fails, it is the engine.
    """

    def __init__(self) -> None:
        self.num_resets = 0  # failed steps since the last token
        self._suspects: list[Request] = []
        self._is_breather = False  # the others are next
        self._failed_together = 0  # requests of the step that began the trial; 0 once a culprit was found
        self._most: int | None = None  # requests that run together
        self._calm = 0  # steps since a failure
        self._skipped = 0  # suspects in a row that could not run

    def choose(self, live: Collection[Request]) -> frozenset[Request] | None:
        """Who of the live requests, oldest first, may run in the next step; None = all."""
        self._suspects = [request for request in self._suspects if request in live]
        if not self._suspects:
            return None if self._most is None or len(live) <= self._most else frozenset(list(live)[: self._most])
        others = frozenset(live).difference(self._suspects)
        return others if self._is_breather and others else frozenset(self._suspects[:1])

    def is_hopeless(self, tried: Sequence[Request], live: Collection[Request]) -> bool:
        """Whether, once a step over `tried` failed, there is nothing left to try: several that had no part in the first
        failure failed too, or nobody else is there."""
        return self.num_resets >= MAX_RESETS and (len(tried) > 1 or set(live) <= set(tried))

    def failed(self, tried: Sequence[Request]) -> Request | None:
        """A step over these raised; the culprit, if there can be no doubt."""
        self.num_resets += 1
        self._calm = 0
        if len(tried) == 1 and tried[0] in self._suspects:
            self._suspects.remove(tried[0])
            self._is_breather, self._failed_together = True, 0
            return tried[0]
        added = [request for request in tried if request not in self._suspects]
        # who has come far has worked so far
        self._suspects += sorted(added, key=lambda request: len(request.output), reverse=True)
        self._is_breather, self._failed_together = False, len(tried)
        return None

    def passed(self, tried: Sequence[Request], is_scored: Iterable[Request]) -> None:
        """A step over these went well; `is_scored`: those that have a new token by it, or ended."""
        scored = set(is_scored)
        if scored:
            self.num_resets = 0
        self._is_breather = False
        was_on_trial = bool(self._suspects)
        self._skipped = 0 if tried else self._skipped + 1
        if self._skipped > len(self._suspects):
            self._suspects, self._failed_together = [], 0  # they wait for each other: together, then
        elif not tried:  # another one may be able to
            self._suspects = self._suspects[1:] + self._suspects[:1]
        elif len(tried) == 1:
            self._suspects = [request for request in self._suspects if request not in scored]
        if was_on_trial and not self._suspects and self._failed_together > 1:
            self._most = max(1, self._failed_together // 2)
        self._grow()

    def _grow(self) -> None:
        self._calm += 1
        if self._most is not None and self._calm >= RELIEF:
            self._calm = 0
            self._most = self._most * 2 if self._most < 1 << 16 else None
