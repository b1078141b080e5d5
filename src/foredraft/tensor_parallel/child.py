"""A process of tensor parallelism, as rank 0 sees it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MODULE = "foredraft.tensor_parallel.rank"
END_SECONDS = 5.0  # seconds in which a process may end by itself before it is killed


class RankChild:
    """Process of one rank, with a private socket in both directions.

    It is a program of its own, not a copy of this one, so that scripts and notebooks need no guard around their code.
    """

    def __init__(self, rank: int, on_loss: Callable[["RankChild", str], None]) -> None:
        """Start the process.

        Args:
            rank: number of the process.
            on_loss: called on another thread with the reason as soon as the process fails or ends.
        """
        self.rank = rank
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # the standard output of a command is its result
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches this process, which ends the others
            )
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._on_loss = on_loss
        self._has_ended = threading.Event()
        self._num_reports = threading.Semaphore(0)
        threading.Thread(target=self._listen, name=f"foredraft-rank-{rank}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Any) -> None:
        """Send a message. Raises OSError if the process has ended."""
        self._connection.send(message)

    def wait_for_report(self) -> None:
        """Wait until the process reports that a part of its start is done, or has ended."""
        self._num_reports.acquire()

    def hang_up(self) -> None:
        """End the messages, at which the process ends."""
        with contextlib.suppress(OSError):  # the process has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended, and kill it if it does not."""
        if not self._has_ended.wait(END_SECONDS):
            self._process.kill()
            self._has_ended.wait()
        self._socket.close()
        self._connection.close()

    def _listen(self) -> None:
        """Read reports until the process ends: None = a part is done, a text = the reason of a failure."""
        try:
            while (reason := self._connection.recv()) is None:
                self._num_reports.release()
            self._on_loss(self, reason)
        except (EOFError, OSError):
            pass
        code = self._process.wait()
        self._has_ended.set()
        self._on_loss(self, _describe_end(code))
        self._num_reports.release()


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
