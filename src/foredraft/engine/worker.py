"""The engine on a thread of its own, with an asynchronous front.

    event loops  -- submit, cancel, drain: one queue of commands -->  the thread steps the engine
    Stream       <-- deltas: one wake-up per step and event loop ---

Nothing but the thread touches the engine, the scheduler or a transcript's deltas.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from foredraft.engine.driver import Driver, Observer, WorkerLimits
from foredraft.engine.engine import Engine
from foredraft.engine.output import Transcript
from foredraft.engine.stream import Stream
from foredraft.errors import ForedraftError

__all__ = ["Draining", "Observer", "QueueFull", "Stream", "Worker", "WorkerLimits"]

log = logging.getLogger(__name__)
STOPPED = "the engine was stopped"
LONGEST_RETRY = 60  # seconds a client is told to wait at most


class QueueFull(ForedraftError):  # noqa: N818 - what it says is a state
    """Too many requests wait; `retry_after` is when to come back, in seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many requests are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


class Draining(ForedraftError):  # noqa: N818
    """No new requests: the worker finishes those it has."""


class HasEngine(Protocol):
    """An LLM whose engine is the worker's alone while it runs."""

    engine: Engine


class Worker:
    """Runs the engine of an LLM for any number of event loops.

    `submit`, `drain` belong to an event loop; everything else may be called from any thread. Times are of `clock`,
    time.monotonic. A step that raises (a kernel, no memory) is taken back: all that was computed is computed again, and
    a request that makes a step fail alone ends with an error. A step that never returns cannot be stopped; `is_healthy`
    tells.
    """

    def __init__(
        self,
        llm: HasEngine,
        limits: WorkerLimits | None = None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = llm.engine
        self.limits = limits or WorkerLimits()
        self.engine.drafter.timeout = self.limits.drafter_timeout
        self._clock = clock
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="foredraft-engine", daemon=True)
        self._lock = threading.Lock()  # of what follows
        self._streams: dict[Stream, int] = {}  # unfinished -> its requests that have not ended
        self._drained: list[Future[bool]] = []
        self._num_sent = 0  # requests that are still in the inbox
        self._is_draining = self._is_closed = False
        # written by the engine's thread, read by all
        self._beat = clock()
        self._is_idle = False
        self._interval = 0.0  # seconds from one end of a request to the next, lately
        # of the engine's thread alone
        self._driver = Driver(llm.engine, self.limits, observer, clock, self._leave)
        self._last_end = clock()
        self._is_stopping = False

    def start(self) -> None:
        """Raises ForedraftError where the LLM has requests of its own, or another worker."""
        if self.engine.is_reserved:
            raise ForedraftError("another Worker runs this LLM; stop it first, or give this one with_drafter's LLM")
        if self.engine.has_work:
            raise ForedraftError("the LLM has unfinished streams; read or close them before its Worker starts")
        self.engine.is_reserved = True
        self._beat = self._clock()
        self._thread.start()

    async def submit(self, transcripts: list[Transcript], deadline: float | None = None) -> Stream:
        """Queue the requests that LLM.prepare made. `deadline`: when they are aborted, in time.monotonic's seconds.

        Raises QueueFull, Draining, or ForedraftError for what can never run.
        """
        for transcript in transcripts:
            self.engine.check(transcript.request)  # reads constants alone
        if len(transcripts) > self.limits.max_queue:
            raise ForedraftError(
                f"{len(transcripts)} texts in one submission and the queue holds {self.limits.max_queue}; send fewer"
            )
        stream = Stream(transcripts, self.cancel, lambda: self._inbox.put(lambda: None))
        with self._lock:
            if self._is_draining:
                raise Draining("the engine takes no new requests: it is shutting down")
            if self._is_closed or not self._thread.is_alive():
                raise ForedraftError("the engine is not running")
            if self.num_waiting + len(transcripts) > self.limits.max_queue:
                raise QueueFull(self._retry_after())
            if transcripts:
                self._streams[stream] = len(transcripts)
                self._num_sent += len(transcripts)
        self._inbox.put(partial(self._add, stream, math.inf if deadline is None else deadline))
        return stream

    def cancel(self, stream: Stream) -> None:
        """End what is left of it before the next step; does nothing to one that has ended."""
        self._inbox.put(partial(self._driver.abort, stream, None))

    def abort_all(self) -> None:
        self._inbox.put(partial(self._driver.end_all, "abort", STOPPED))

    async def drain(self, timeout: float) -> bool:
        """Take no new requests, for good, and wait for those there are. True if all ended in time."""
        done: Future[bool] = Future()
        with self._lock:
            self._is_draining = True
            if not self._streams:
                return True
            self._drained.append(done)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), timeout)
        except TimeoutError:
            return False

    def stop(self) -> None:
        """Abort what is left and join the thread. One that hangs is left behind, and its streams raise."""
        self._inbox.put(self._stop)
        if self._thread.is_alive():
            self._thread.join(self.limits.hang_after)
        if self._thread.is_alive():
            log.error("the engine's thread hangs in a step and was left behind")
        self._close_streams()

    @property
    def heartbeat(self) -> float:
        """When the last step finished; now, where there is nothing to step."""
        return self._clock() if self._is_idle else self._beat

    @property
    def is_healthy(self) -> bool:
        is_late = self._clock() - self.heartbeat >= self.limits.hang_after
        return self._thread.is_alive() and not self._driver.is_broken and not is_late

    @property
    def is_accepting(self) -> bool:
        is_open = self._thread.is_alive() and not self._is_draining and not self._is_closed
        return is_open and self.num_waiting < self.limits.max_queue

    @property
    def num_waiting(self) -> int:
        return self._num_sent + len(self.engine.scheduler.waiting)  # a length is read whole from any thread

    @property
    def num_running(self) -> int:
        return len(self.engine.scheduler.running)

    def _retry_after(self) -> int:
        """Until half of those that wait have begun."""
        return max(1, min(LONGEST_RETRY, math.ceil(self._interval * self.num_waiting / 2)))

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while not self._is_stopping:
                self._obey()
                if not self._is_stopping:
                    self._driver.turn()
                self._tick()
        except Exception:
            log.exception("the engine's thread ended")
        finally:
            self._close()

    def _tick(self) -> None:
        """A sign of life; none while there are requests and the scheduler runs nobody, which is a hang too."""
        if not self._driver.is_stuck:
            self._beat = self._clock()
        self._is_idle = False

    def _obey(self) -> None:
        """Carry out every command that came; wait for one where there is nothing to step."""
        wait = self._driver.wait()
        try:
            if wait != 0:
                self._is_idle = not self._driver.is_stuck
                command = self._inbox.get(timeout=wait)
                self._tick()
                command()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            self._tick()

    def _add(self, stream: Stream, deadline: float) -> None:
        self._driver.add(stream, deadline)
        with self._lock:
            self._num_sent -= len(stream.transcripts)

    def _stop(self) -> None:
        self._is_stopping = True

    def _leave(self, stream: Stream) -> None:
        """One request of a stream ended."""
        now, drained = self._clock(), []
        self._interval += 0.1 * (now - self._last_end - self._interval)
        self._last_end = now
        with self._lock:
            left = self._streams.pop(stream, 1) - 1  # gone already where `stop` gave up on a thread that hung
            if left:
                self._streams[stream] = left
            if not self._streams:
                drained, self._drained = self._drained, []
        _tell(drained, True)

    def _close(self) -> None:
        """The thread ends: so does everything it has."""
        try:
            self._driver.end_all("abort", STOPPED)
            self._driver.turn()
        except Exception:
            log.exception("requests could not be ended one by one")
        self.engine.is_reserved = False
        self._close_streams()

    def _close_streams(self) -> None:
        """What is still open will get nothing more, and says so."""
        with self._lock:
            self._is_closed = True
            streams, self._streams = list(self._streams), {}
            drained, self._drained = self._drained, []
        for stream in streams:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                stream.loop.call_soon_threadsafe(stream.close, STOPPED)
        _tell(drained, not streams)


def _tell(futures: Sequence[Future[bool]], value: bool) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_result(value)
