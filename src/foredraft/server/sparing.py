"""Warnings that clients can bring about at will: each is written once a minute, so that no client fills the log."""

import logging
import time
from collections.abc import Callable

PERIOD = 60.0  # seconds between two lines that say the same


class Sparing(logging.Filter):
    """Passes the first warning of its kind in a period, with how many were left out before it; errors always pass."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last: dict[str, tuple[float, int]] = {}  # format string -> (when it was written, left out since)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        now, kind = self._clock(), str(record.msg)
        written, left_out = self._last.get(kind, (-PERIOD, 0))
        if now - written < PERIOD:
            self._last[kind] = written, left_out + 1
            return False
        self._last[kind] = now, 0
        if left_out:
            record.msg = f"{kind} ({left_out} more like it before)"
        return True


def sparing_logger(name: str) -> logging.Logger:
    """A logger below the one of this name. It is of its owner alone: no filter is left behind on a shared one."""
    logger = logging.Logger(name)
    logger.parent = logging.getLogger(name)
    logger.addFilter(Sparing())
    return logger
