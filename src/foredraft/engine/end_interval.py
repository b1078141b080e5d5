"""Interval between the ends of two requests, from which a wait in the queue is estimated."""

import math
from collections.abc import Callable

MAX_RETRY_SECONDS = 60  # largest estimate, in seconds
INTERVAL_WEIGHT = 0.1  # weight of the newest interval in the moving average


class EndInterval:
    """Moving average of the seconds between the ends of two requests. One thread records, and any thread reads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin without an end.

        Args:
            clock: time in seconds.
        """
        self._clock = clock
        self._last_end = clock()
        self._average = 0.0

    def record_end(self) -> None:
        """Record the end of a request at the current time."""
        now = self._clock()
        self._average += INTERVAL_WEIGHT * (now - self._last_end - self._average)
        self._last_end = now

    def estimate_retry_after(self, num_waiting: int) -> int:
        """Estimate the seconds until half of the waiting requests have started."""
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(self._average * num_waiting / 2)))
