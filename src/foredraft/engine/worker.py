"""Engine on its own thread, with an asynchronous interface.

    event loops  -- submit, cancel, drain: one queue of commands -->  the thread steps the engine
    Stream       <-- deltas: one wake-up per step and event loop ---

Only this thread accesses the engine, the scheduler and the deltas of a transcript.
"""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

import torch

from foredraft.engine.engine import Engine
from foredraft.engine.heartbeat import Heartbeat
from foredraft.engine.loop import EngineLoop, EngineObserver, WorkerLimits
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.stream import Stream
from foredraft.engine.stream_registry import DrainingError, QueueFullError, StreamRegistry
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError

__all__ = ["DrainingError", "EngineObserver", "QueueFullError", "Stream", "Worker", "WorkerLimits"]

log = logging.getLogger(__name__)
STOPPED_ERROR = "the engine was stopped"
Value = TypeVar("Value")


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
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="foredraft-engine", daemon=True)
        # The streams are shared by all threads. The heartbeat is written by the engine's thread and read by all.
        # The registry refers to the scheduler, not to the worker: without a cycle, a stopped worker is freed at once.
        self._streams = StreamRegistry(self.limits.max_queue, partial(_count_queued, self.engine.scheduler), clock)
        self._heartbeat = Heartbeat(clock)
        # These fields are used by the engine's thread only.
        self._engine_loop = EngineLoop(llm.engine, self.limits, observer, clock, self._streams.end_request)
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
        self._heartbeat.beat()
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
        self._streams.add(stream, is_running=self._thread.is_alive())
        self._inbox.put(partial(self._add_stream, stream, math.inf if deadline is None else deadline))
        return stream

    async def run_between_steps(self, work: Callable[[], Value]) -> Value:
        """Run work on the engine's thread before its next step, and return its result or raise its exception.

        Raises:
            ForedraftError: the worker does not run.
        """
        if not self._thread.is_alive():
            raise ForedraftError(STOPPED_ERROR)
        future: Future[Value] = Future()
        self._inbox.put(partial(_resolve, future, work))
        return await asyncio.wrap_future(future)

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
        done = self._streams.start_drain()
        if done.done():  # without a turn of the event loop, so that a timeout of 0 does for an idle worker
            return done.result()
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
        self._streams.close(STOPPED_ERROR)

    @property
    def heartbeat(self) -> float:
        """Time of `clock` at which the last step finished; the current time if there is nothing to step."""
        return self._heartbeat.time

    @property
    def is_healthy(self) -> bool:
        """True if the thread lives, steps succeed, and the heartbeat is younger than `hang_after`."""
        is_late = self._heartbeat.age >= self.limits.hang_after
        return self._thread.is_alive() and not self._engine_loop.is_broken and not is_late

    @property
    def is_accepting(self) -> bool:
        """True if `submit` has room for at least one request."""
        return self._thread.is_alive() and self._streams.has_room

    @property
    def num_waiting(self) -> int:
        """Requests that have not started, or were preempted."""
        return self._streams.num_waiting

    @property
    def num_running(self) -> int:
        return len(self.engine.scheduler.running)

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
            self._heartbeat.beat()
        self._heartbeat.is_idle = False

    def _run_commands(self) -> None:
        """Run all queued commands; if there is nothing to step, wait for one first."""
        wait = self._engine_loop.compute_wait()
        try:
            if wait != 0:
                self._heartbeat.is_idle = not self._engine_loop.is_stuck
                command = self._inbox.get(timeout=wait)
                self._update_heartbeat()
                command()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            self._update_heartbeat()

    def _add_stream(self, stream: Stream, deadline: float) -> None:
        self._engine_loop.add(stream, deadline)
        self._streams.receive(stream)

    def _stop(self) -> None:
        self._is_stopping = True

    def _close(self) -> None:
        """End all requests and streams at the end of the thread."""
        try:
            self._engine_loop.end_all("abort", STOPPED_ERROR)
            self._engine_loop.run_once()
        except Exception:
            log.exception("requests could not be ended one by one")
        self.engine.is_reserved = False
        self._streams.close(STOPPED_ERROR)


def _count_queued(scheduler: Scheduler) -> int:
    return len(scheduler.waiting)  # `len` of a list is atomic


def _resolve(future: "Future[Value]", work: Callable[[], Value]) -> None:
    """Run work and store its outcome; work whose caller has gone is skipped."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except Exception as error:  # belongs to the caller, not to the engine
            future.set_exception(error)
