"""Fault isolation: find the request that makes steps fail by running suspects one at a time."""

from collections.abc import Collection, Iterable, Sequence

from foredraft.request import Request

MAX_RESETS = 3  # failed steps without a token between them, after which the engine itself may be at fault
RELAX_AFTER_STEPS = 256  # steps without a failure, after which the batch limit doubles
MAX_BATCH_LIMIT = 1 << 16  # requests: a batch limit this large is removed


class FaultIsolator:
    """Policy for the steps after a failed step.

    The requests of the failed step become suspects. Each runs alone until it has a new token.

    - A suspect that fails alone is the culprit. The other requests then take a step, which tests the engine.
    - If no suspect fails alone, the batch size caused the failure (memory): the batch limit is halved for a while.
    - If all fail, the engine is at fault.
    """

    def __init__(self) -> None:
        self.num_resets = 0  # failed steps since the last new token
        self._suspects: list[Request] = []
        self._runs_others_next = False  # the next step runs the requests that are no suspects
        self._num_failed_together = 0  # batch size of the step that made the suspects; 0 once a culprit was identified
        self._max_together: int | None = None  # batch limit, in requests; None = no limit
        self._steps_since_failure = 0
        self._num_skipped = 0  # steps in a row in which no suspect could run

    def select(self, live: Collection[Request]) -> frozenset[Request] | None:
        """Select the requests that may run in the next step. None = all.

        Args:
            live: requests that have not ended, oldest first.
        """
        self._suspects = [request for request in self._suspects if request in live]
        if not self._suspects:
            return (
                None
                if self._max_together is None or len(live) <= self._max_together
                else frozenset(list(live)[: self._max_together])
            )
        others = frozenset(live).difference(self._suspects)
        return others if self._runs_others_next and others else frozenset(self._suspects[:1])

    def is_engine_fault(self, requests: Sequence[Request], live: Collection[Request]) -> bool:
        """Return True if the failure of a step cannot be attributed to a request.

        That is so after MAX_RESETS failures, if several requests failed together again or no other request is live.

        Args:
            requests: requests of the failed step.
            live: all requests that have not ended.
        """
        return self.num_resets >= MAX_RESETS and (len(requests) > 1 or set(live) <= set(requests))

    def on_failure(self, requests: Sequence[Request]) -> Request | None:
        """Record that a step over `requests` raised. Returns the culprit if it is certain."""
        self.num_resets += 1
        self._steps_since_failure = 0
        if len(requests) == 1 and requests[0] in self._suspects:
            self._suspects.remove(requests[0])
            self._runs_others_next, self._num_failed_together = True, 0
            return requests[0]
        added = [request for request in requests if request not in self._suspects]
        # Requests with a longer output have worked in more steps, so they are tested first.
        self._suspects += sorted(added, key=lambda request: len(request.output), reverse=True)
        self._runs_others_next, self._num_failed_together = False, len(requests)
        return None

    def on_success(self, requests: Sequence[Request], progressed: Iterable[Request]) -> None:
        """Record that a step over `requests` succeeded.

        Args:
            requests: requests of the step.
            progressed: requests that have a new token or ended.
        """
        cleared = set(progressed)
        if cleared:
            self.num_resets = 0
        self._runs_others_next = False
        had_suspects = bool(self._suspects)
        self._num_skipped = 0 if requests else self._num_skipped + 1
        if self._num_skipped > len(self._suspects):
            self._suspects, self._num_failed_together = [], 0  # the suspects wait for each other: run them together
        elif not requests:  # the first suspect could not run; the next may be able to
            self._suspects = self._suspects[1:] + self._suspects[:1]
        elif len(requests) == 1:
            self._suspects = [request for request in self._suspects if request not in cleared]
        if had_suspects and not self._suspects and self._num_failed_together > 1:
            self._max_together = max(1, self._num_failed_together // 2)
        self._relax_limit()

    def _relax_limit(self) -> None:
        """Double the batch limit after RELAX_AFTER_STEPS steps without a failure."""
        self._steps_since_failure += 1
        if self._max_together is not None and self._steps_since_failure >= RELAX_AFTER_STEPS:
            self._steps_since_failure = 0
            self._max_together = self._max_together * 2 if self._max_together < MAX_BATCH_LIMIT else None
