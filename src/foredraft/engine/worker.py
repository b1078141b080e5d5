"""Engine on its own thread, with an asynchronous interface.

    event loops  -- submit, cancel, drain: one queue of commands -->  the thread steps the engine
    Stream       <-- deltas: one wake-up per step and event loop ---

Only this thread accesses the engine, the scheduler and the deltas of a transcript.
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

from foredraft.engine.engine import Engine
from foredraft.engine.loop import EngineLoop, EngineObserver, WorkerLimits
from foredraft.engine.stream import Stream
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError

__all__ = ["DrainingError", "EngineObserver", "QueueFullError", "Stream", "Worker", "WorkerLimits"]

log = logging.getLogger(__name__)
STOPPED_ERROR = "the engine was stopped"
MAX_RETRY_SECONDS = 60  # largest `retry_after` of QueueFullError, in seconds
END_INTERVAL_WEIGHT = 0.1  # weight of the newest interval in the moving average of times between request ends


class QueueFullError(ForedraftError):
    """The queue of waiting requests is full; `retry_after` is the suggested wait in seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many requests are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


class DrainingError(ForedraftError):
    """The worker is draining: it finishes its requests and accepts no new ones."""


class EngineOwner(Protocol):
    """LLM whose engine is reserved for the worker while it runs."""

    engine: Engine


class Worker:
    """Engine thread of an LLM, for any number of event loops.

    `submit` and `drain` are called on an event loop, all other methods on any thread. After a step that raises (kernel
    error, out of memory), all requests are recomputed, and a request that makes steps fail alone ends with an error. A
    step that never returns cannot be stopped; `is_healthy` is then False.
    """

    def __init__(
        self,
        llm: EngineOwner,
        limits: WorkerLimits | None = None,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare a worker; `start` starts its thread.

        Args:
            llm: LLM without unfinished requests.
            limits: None = the defaults.
            observer: receives steps, ends and failures, on the engine's thread.
            clock: time in seconds. Deadlines of `submit` refer to it.
        """
        self.engine = llm.engine
        self.limits = limits or WorkerLimits()
        self.engine.drafter.timeout = self.limits.drafter_timeout
        self._clock = clock
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="foredraft-engine", daemon=True)
        # These fields are guarded by `_lock`.
        self._lock = threading.Lock()
        self._streams: dict[Stream, int] = {}  # unfinished stream -> number of its requests that have not ended
        self._drain_futures: list[Future[bool]] = []
        self._num_in_inbox = 0  # requests that are still in the inbox
        self._is_draining = self._is_closed = False
        # These fields are written by the engine's thread and read by all.
        self._last_heartbeat = clock()
        self._is_idle = False
        self._end_interval = 0.0  # seconds between the ends of two requests, moving average
        # These fields are used by the engine's thread only.
        self._engine_loop = EngineLoop(llm.engine, self.limits, observer, clock, self._on_request_end)
        self._last_end = clock()
        self._is_stopping = False

    def start(self) -> None:
        """Start the thread.

        Raises:
            ForedraftError: the LLM has unfinished requests or another worker.
        """
        if self.engine.is_reserved:
            raise ForedraftError("another Worker runs this LLM; stop it first, or give this one with_drafter's LLM")
        if self.engine.has_work:
            raise ForedraftError("the LLM has unfinished streams; read or close them before its Worker starts")
        self.engine.is_reserved = True
        self._last_heartbeat = self._clock()
        self._thread.start()

    async def submit(self, transcripts: list[Transcript], deadline: float | None = None) -> Stream:
        """Queue requests that LLM.prepare made, and return the stream of their deltas.

        Args:
            transcripts: requests, which share one stream.
            deadline: time of `clock` (default time.monotonic) at which they are aborted. None = never.

        Raises:
            QueueFullError: too many requests wait.
            DrainingError: `drain` was called.
            ForedraftError: a request can never run, or the worker does not run.
        """
        for transcript in transcripts:
            self.engine.check(transcript.request)  # reads only constants, so that any thread may call it
        if len(transcripts) > self.limits.max_queue:
            raise ForedraftError(
                f"{len(transcripts)} requests in one submission and the queue holds {self.limits.max_queue}; send fewer"
            )
        stream = Stream(transcripts, self.cancel, lambda: self._inbox.put(lambda: None))
        with self._lock:
            if self._is_draining:
                raise DrainingError("the engine accepts no new requests: it is shutting down")
            if self._is_closed or not self._thread.is_alive():
                raise ForedraftError("the engine is not running")
            if self.num_waiting + len(transcripts) > self.limits.max_queue:
                raise QueueFullError(self._estimate_retry_after())
            if transcripts:
                self._streams[stream] = len(transcripts)
                self._num_in_inbox += len(transcripts)
        self._inbox.put(partial(self._add_stream, stream, math.inf if deadline is None else deadline))
        return stream

    def cancel(self, stream: Stream) -> None:
        """Abort the unfinished requests of a stream before the next step."""
        self._inbox.put(partial(self._engine_loop.abort, stream, None))

    def abort_all(self) -> None:
        """Abort all requests before the next step."""
        self._inbox.put(partial(self._engine_loop.end_all, "abort", STOPPED_ERROR))

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests from now on, and wait for the queued and running ones.

        Args:
            timeout: seconds to wait at most.

        Returns:
            True if all requests ended in time.
        """
        done: Future[bool] = Future()
        with self._lock:
            self._is_draining = True
            if not self._streams:
                return True
            self._drain_futures.append(done)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), timeout)
        except TimeoutError:
            return False

    def stop(self) -> None:
        """Abort all requests and join the thread. A hung thread is abandoned, and its streams raise."""
        self._inbox.put(self._stop)
        if self._thread.is_alive():
            self._thread.join(self.limits.hang_after)
        if self._thread.is_alive():
            log.error("the engine's thread hangs in a step and was abandoned")
        self._close_streams()

    @property
    def heartbeat(self) -> float:
        """Time of `clock` at which the last step finished; the current time if there is nothing to step."""
        return self._clock() if self._is_idle else self._last_heartbeat

    @property
    def is_healthy(self) -> bool:
        """True if the thread lives, steps succeed, and the heartbeat is younger than `hang_after`."""
        is_late = self._clock() - self.heartbeat >= self.limits.hang_after
        return self._thread.is_alive() and not self._engine_loop.is_broken and not is_late

    @property
    def is_accepting(self) -> bool:
        """True if `submit` has room for at least one request."""
        is_open = self._thread.is_alive() and not self._is_draining and not self._is_closed
        return is_open and self.num_waiting < self.limits.max_queue

    @property
    def num_waiting(self) -> int:
        """Requests that have not started, or were preempted."""
        return self._num_in_inbox + len(self.engine.scheduler.waiting)  # `len` of a list is atomic

    @property
    def num_running(self) -> int:
        return len(self.engine.scheduler.running)

    def _estimate_retry_after(self) -> int:
        """Estimate the seconds until half of the waiting requests have started."""
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(self._end_interval * self.num_waiting / 2)))

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while not self._is_stopping:
                self._run_commands()
                if not self._is_stopping:
                    self._engine_loop.run_once()
                self._update_heartbeat()
        except Exception:
            log.exception("the engine's thread ended")
        finally:
            self._close()

    def _update_heartbeat(self) -> None:
        """Update the heartbeat, unless the scheduler runs none of its requests, which counts as a hang."""
        if not self._engine_loop.is_stuck:
            self._last_heartbeat = self._clock()
        self._is_idle = False

    def _run_commands(self) -> None:
        """Run all queued commands; if there is nothing to step, wait for one first."""
        wait = self._engine_loop.compute_wait()
        try:
            if wait != 0:
                self._is_idle = not self._engine_loop.is_stuck
                command = self._inbox.get(timeout=wait)
                self._update_heartbeat()
                command()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            self._update_heartbeat()

    def _add_stream(self, stream: Stream, deadline: float) -> None:
        self._engine_loop.add(stream, deadline)
        with self._lock:
            self._num_in_inbox -= len(stream.transcripts)

    def _stop(self) -> None:
        self._is_stopping = True

    def _on_request_end(self, stream: Stream) -> None:
        """Count one ended request of a stream, and resolve `drain` after the last one."""
        now, resolved = self._clock(), []
        self._end_interval += END_INTERVAL_WEIGHT * (now - self._last_end - self._end_interval)
        self._last_end = now
        with self._lock:
            num_left = self._streams.pop(stream, 1) - 1  # missing if `stop` has abandoned a hung thread
            if num_left:
                self._streams[stream] = num_left
            if not self._streams:
                resolved, self._drain_futures = self._drain_futures, []
        _resolve_futures(resolved, True)

    def _close(self) -> None:
        """End all requests and streams at the end of the thread."""
        try:
            self._engine_loop.end_all("abort", STOPPED_ERROR)
            self._engine_loop.run_once()
        except Exception:
            log.exception("requests could not be ended one by one")
        self.engine.is_reserved = False
        self._close_streams()

    def _close_streams(self) -> None:
        """End the streams that are still open with an error."""
        with self._lock:
            self._is_closed = True
            streams, self._streams = list(self._streams), {}
            resolved, self._drain_futures = self._drain_futures, []
        for stream in streams:
            with contextlib.suppress(RuntimeError):  # the event loop of the stream is closed
                stream.loop.call_soon_threadsafe(stream.close, STOPPED_ERROR)
        _resolve_futures(resolved, not streams)


def _resolve_futures(futures: Sequence[Future[bool]], value: bool) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_result(value)
