"""Ctrl-C and SIGTERM end a long run after the step under way."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handle_stop_signals() -> Iterator[Callable[[], bool]]:
    """Yields whether a signal has come since. A second Ctrl-C interrupts at once. Off the main thread, where Python
    delivers no signals, the answer is always False."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
