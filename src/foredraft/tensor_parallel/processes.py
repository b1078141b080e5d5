"""The other processes of a model, and the first of them that fails."""

import os
import threading

from foredraft.errors import TargetLostError
from foredraft.tensor_parallel.child import RankChild
from foredraft.tensor_parallel.messages import Message
from foredraft.tensor_parallel.process_group import interrupt_collectives, leave_group
from foredraft.tensor_parallel.task import RankTask

BLAME_SECONDS = 2.0  # seconds in which the end of another process may be noticed after a pass has failed because of it


class RankProcesses:
    """Processes of all ranks but 0. Once one fails, all are ended, and every use raises TargetLostError."""

    def __init__(self, size: int) -> None:
        """Start the processes.

        Args:
            size: number of ranks, 0 included.
        """
        self._lock = threading.Lock()
        self._failure: str | None = None
        self._failed = threading.Event()
        self._is_ending = False
        self._creator = os.getpid()
        self._size = size
        self._children: list[RankChild] = []
        for rank in range(1, size):
            self._children.append(RankChild(rank, self._record_loss))

    @property
    def process_ids(self) -> list[int]:
        """Operating-system ids, by rank."""
        return [child.pid for child in self._children]

    def load(self, tasks: list[RankTask]) -> None:
        """Give the processes their tasks, and wait until all can join the process group."""
        for child, task in zip(self._children, tasks, strict=True):
            self._send_to(child, task)
        self.wait_for_reports()

    def wait_for_reports(self) -> None:
        """Wait until every process has done the next part of its start."""
        for child in self._children:
            child.wait_for_report()
            self.check()

    def send(self, message: Message) -> None:
        """Send a message to every process."""
        for child in self._children:
            self._send_to(child, message)

    def check(self) -> None:
        """Raise TargetLostError if a process has failed."""
        if self._failure is not None:
            raise TargetLostError(self._failure)

    def record_failure(self, error: BaseException) -> None:
        """Record that a pass has failed in this process, unless another process is the reason."""
        if not self._failed.wait(BLAME_SECONDS):
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._record(f"rank 0 of {self._size} failed ({text})")

    def end(self) -> None:
        """End the processes and leave the process group."""
        if os.getpid() != self._creator:  # a fork: the processes belong to its parent
            return
        with self._lock:
            if self._is_ending:
                return
            self._is_ending = True
            self._failure = self._failure or "the processes of this model have ended with LLM.close; make a new LLM"
        leave_group()  # while the others are there: gloo closes its connections best if nothing arrives on them
        for child in self._children:
            child.hang_up()
        for child in self._children:
            child.wait()

    def _send_to(self, child: RankChild, message: object) -> None:
        try:
            child.send(message)
        except OSError:  # the process has ended, which its thread notices too
            self._failed.wait(BLAME_SECONDS)
            self._record_loss(child, "has ended")
            self.check()

    def _record_loss(self, child: RankChild, reason: str) -> None:
        self._record(f"rank {child.rank} of {self._size} (process {child.pid}) {reason}")

    def _record(self, event: str) -> None:
        """Record the first failure, and end the processes: without one of them the others wait forever."""
        with self._lock:
            if self._is_ending or self._failure is not None:
                return
            self._failure = f"{event}, and the model is split over all ranks; make a new LLM, or restart the command"
        for child in self._children:
            child.kill()
        interrupt_collectives()
        self._failed.set()
