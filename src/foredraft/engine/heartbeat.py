"""Heartbeat of the engine's thread: the time of its last sign of progress."""

from collections.abc import Callable


class Heartbeat:
    """Time at which a thread last made progress. One thread writes it, and any thread reads it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin with a beat now.

        Args:
            clock: time in seconds.
        """
        self.is_idle = False  # the thread waits for work, which is no lack of progress
        self._clock = clock
        self._last_beat = clock()

    @property
    def time(self) -> float:
        """Time of the last beat; the current time while the thread is idle."""
        return self._clock() if self.is_idle else self._last_beat

    @property
    def age(self) -> float:
        """Seconds since `time`."""
        return self._clock() - self.time

    def beat(self) -> None:
        """Record progress at the current time."""
        self._last_beat = self._clock()
