"""Program of every rank but 0: loads its part of the model, then runs the messages of rank 0 until they end.

It makes no decision, so ranks cannot diverge. It ends with rank 0: a thread reads the end of the messages.
"""

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

MAX_ERROR_CHARS = 300  # characters of an error in the report to rank 0
DONE, FAILED = 0, 1  # exit codes


def main(descriptor: int) -> None:
    """Run the rank whose messages come from a socket.

    Args:
        descriptor: file descriptor of the socket. The first message is a `RankTask`.
    """
    # A signal to a whole service must not end this process while rank 0 finishes its requests.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = Connection(descriptor)
    messages: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, messages), daemon=True).start()
    try:
        _run(connection, messages)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        with contextlib.suppress(OSError):
            connection.send(f"failed ({text[:MAX_ERROR_CHARS]})")
    os._exit(FAILED)


def _read(connection: Connection, messages: "SimpleQueue[Any]") -> None:
    """Read messages, and end the process when they end, also in the middle of a collective."""
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        # Without the shutdown of the interpreter, which may wait for a collective that never ends.
        os._exit(DONE)


def _run(connection: Connection, messages: "SimpleQueue[Any]") -> None:
    task = messages.get()
    import torch  # after the first message, which imports it on the other thread: one import at a time

    connection.send(None)
    shard = task.load_shard()
    connection.send(None)
    with torch.inference_mode():
        while True:
            messages.get().run(shard)


if __name__ == "__main__":
    main(int(sys.argv[1]))
