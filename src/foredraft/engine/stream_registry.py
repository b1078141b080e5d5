"""Streams of a worker that have not ended: their admission, and the end of the last one."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from foredraft.engine.end_interval import EndInterval
from foredraft.engine.stream import Stream
from foredraft.errors import ForedraftError


class QueueFullError(ForedraftError):
    """The queue of waiting requests is full; `retry_after` is the suggested wait in seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many requests are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


class DrainingError(ForedraftError):
    """The worker is draining: it finishes its requests and accepts no new ones."""


class StreamRegistry:
    """Open streams of a worker. Any thread may call the methods.

    A stream is added on an event loop, and the engine's thread then receives its requests and ends them one by one.
    """

    def __init__(self, max_queue: int, count_queued: Callable[[], int], clock: Callable[[], float]) -> None:
        """Begin without a stream.

        Args:
            max_queue: waiting requests at most.
            count_queued: returns the number of waiting requests that the engine's thread has received.
            clock: time in seconds.
        """
        self.max_queue = max_queue
        self._count_queued = count_queued
        self._end_interval = EndInterval(clock)  # written by the engine's thread
        # These fields are guarded by `_lock`.
        self._lock = threading.Lock()
        self._num_left: dict[Stream, int] = {}  # open stream -> number of its requests that have not ended
        self._drain_futures: list[Future[bool]] = []
        self._num_unreceived = 0  # requests that the engine's thread has not received
        self._is_draining = self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Requests that have not started, or were preempted."""
        return self._num_unreceived + self._count_queued()

    @property
    def has_room(self) -> bool:
        """True if a stream of one request can be added."""
        return not self._is_draining and not self._is_closed and self.num_waiting < self.max_queue

    def add(self, stream: Stream, is_running: bool) -> None:
        """Add a stream.

        Args:
            stream: stream with all its requests.
            is_running: the engine's thread runs.

        Raises:
            QueueFullError: too many requests wait.
            DrainingError: `start_drain` was called.
            ForedraftError: the engine's thread does not run.
        """
        count = len(stream.transcripts)
        with self._lock:
            if self._is_draining:
                raise DrainingError("the engine accepts no new requests: it is shutting down")
            if self._is_closed or not is_running:
                raise ForedraftError("the engine is not running")
            if self.num_waiting + count > self.max_queue:
                raise QueueFullError(self._end_interval.estimate_retry_after(self.num_waiting))
            if count:
                self._num_left[stream] = count
                self._num_unreceived += count

    def receive(self, stream: Stream) -> None:
        """Count the requests of a stream as received by the engine's thread."""
        with self._lock:
            self._num_unreceived -= len(stream.transcripts)

    def end_request(self, stream: Stream) -> None:
        """Count one ended request of a stream, and resolve the drains after the last one."""
        self._end_interval.record_end()
        resolved: list[Future[bool]] = []
        with self._lock:
            num_left = self._num_left.pop(stream, 1) - 1  # missing if `close` has abandoned a hung thread
            if num_left:
                self._num_left[stream] = num_left
            if not self._num_left:
                resolved, self._drain_futures = self._drain_futures, []
        _resolve_futures(resolved, True)

    def start_drain(self) -> Future[bool]:
        """Refuse new streams from now on. The future is True once all requests have ended, False after `close`."""
        done: Future[bool] = Future()
        with self._lock:
            self._is_draining = True
            if self._num_left:
                self._drain_futures.append(done)
            else:
                done.set_result(True)
        return done

    def close(self, error: str) -> None:
        """End the streams that are still open with an error, and refuse new ones."""
        with self._lock:
            self._is_closed = True
            streams, self._num_left = list(self._num_left), {}
            resolved, self._drain_futures = self._drain_futures, []
        for stream in streams:
            with contextlib.suppress(RuntimeError):  # the event loop of the stream is closed
                stream.loop.call_soon_threadsafe(stream.close, error)
        _resolve_futures(resolved, not streams)


def _resolve_futures(futures: Sequence[Future[bool]], value: bool) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_result(value)
