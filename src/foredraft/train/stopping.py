"""Signal handlers that end a long run after its current step."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handle_stop_signals() -> Iterator[Callable[[], bool]]:
    """Handle Ctrl-C and SIGTERM in a `with` block; yield a function that returns whether one has arrived.

    A second Ctrl-C raises KeyboardInterrupt at once. On another thread than the main one the function always returns
    False, since Python delivers no signals there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []

    def record(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    previous_handlers = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
