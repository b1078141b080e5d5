"""Rate limit for warnings that clients can cause: one line per kind and minute, so that no client fills the log."""

import logging
import time
from collections.abc import Callable

PERIOD_SECONDS = 60.0  # seconds between two warnings with the same format string


class LogThrottle(logging.Filter):
    """Log filter that passes one warning per format string and period, with the number suppressed before it.

    Errors always pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[str, tuple[float, int]] = {}  # format string -> (time written, warnings suppressed since)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        now, kind = self._clock(), str(record.msg)
        last_time, num_suppressed = self._last.get(kind, (-PERIOD_SECONDS, 0))
        if now - last_time < PERIOD_SECONDS:
            self._last[kind] = last_time, num_suppressed + 1
            return False
        self._last[kind] = now, 0
        if num_suppressed:
            record.msg = f"{kind} ({num_suppressed} more like it before)"
        return True


def make_throttled_logger(name: str) -> logging.Logger:
    """Make a throttled child of the named logger. It is not registered, so that the filter affects no other user."""
    logger = logging.Logger(name)
    logger.parent = logging.getLogger(name)
    logger.addFilter(LogThrottle())
    return logger
