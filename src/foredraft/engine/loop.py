"""Loop of the engine's thread: step, deliver deltas, enforce deadlines, isolate faults.

Everything here runs on one thread and takes no locks. `worker.py` has the thread and its commands.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from foredraft.draft_length.policy import StepReport
from foredraft.engine.engine import Engine
from foredraft.engine.fault_isolation import FaultIsolator
from foredraft.engine.sandbox import TIMEOUT
from foredraft.engine.step_result import NO_STEP, StepResult
from foredraft.engine.stream import Stream, deliver_deltas, estimate_bytes
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError, TargetLostError
from foredraft.outputs import Delta, FinishReason
from foredraft.request import Request

log = logging.getLogger(__name__)
REQUEST_FAULT_ERROR = "the model failed on this request; it was ended so that the others could go on"
ENGINE_FAULT_ERROR = "the engine failed repeatedly; all its requests were ended"
IDLE_POLL_SECONDS = 0.005  # seconds between steps while the scheduler can run none of the requests
MIN_WAIT_SECONDS = 0.001  # seconds of the shortest wait for a command
MAX_WAIT_SECONDS = 3600.0  # seconds of the longest wait for a command: queue timeouts must be finite


@dataclass(frozen=True)
class WorkerLimits:
    """Limits of queues, times and buffers of a Worker."""

    max_queue: int = 256  # requests that wait to run
    queue_timeout: float = math.inf  # seconds a request may wait until it first runs
    hang_after: float = 10.0  # seconds without a finished step, with work to do, until the worker is unhealthy
    max_buffered: int = 1 << 20  # approximate unread bytes of a stream, above which its requests pause
    stall_after: float = 30.0  # seconds a stream may pause before its requests are aborted
    drafter_timeout: float = TIMEOUT  # seconds one proposal may take; longer ones count as failures of the drafter


class EngineObserver(Protocol):
    """Receiver of engine events, for metrics.

    Methods are called on the engine's thread and block it. Exceptions are logged and ignored.
    """

    def on_step(self, requests: Sequence[Request], report: StepReport) -> None:
        """Receive the requests of a step, at least one, and its report."""

    def on_finish(self, transcript: Transcript) -> None:
        """Receive the transcript of a request that ended for any reason, before its last delta is sent."""

    def on_failure(self, kind: str) -> None:
        """Receive a failure.

        Args:
            kind: `step`: a step raised and is undone. `request`: a request was ended as its culprit. `engine`: too
                many steps failed in a row, and all requests were ended.
        """


@dataclass(eq=False)
class ActiveRequest:
    """One request that has not ended."""

    transcript: Transcript
    stream: Stream
    deadline: float  # clock time at which the request is aborted
    start_deadline: float  # clock time by which it must have run; infinity once it has


class EngineLoop:
    """Active requests of an engine, and the steps that advance, pause and end them.

    `on_request_end` is called with the stream of every request that ended, after its last delta was sent. `clock`
    returns seconds; all deadlines refer to it.
    """

    def __init__(
        self,
        engine: Engine,
        limits: WorkerLimits,
        observer: EngineObserver | None,
        clock: Callable[[], float],
        on_request_end: Callable[[Stream], None],
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.observer = observer
        self.is_broken = False  # too many steps failed, and no step succeeded since
        self.is_stuck = False  # the last step could run none of the active requests
        self._clock = clock
        self._on_request_end = on_request_end
        self._active_requests: dict[Request, ActiveRequest] = {}  # oldest first
        self._ended_requests: list[Request] = []  # requests ended outside a step since the last delivery
        self._paused_streams: dict[Stream, float] = {}  # streams with too many unread bytes -> clock time of the pause
        self._fault_isolator = FaultIsolator()
        self._next_deadline = math.inf

    def run_once(self) -> None:
        """Enforce deadlines, run a step if there are active requests, and deliver deltas."""
        self._expire_requests()
        self._check_paused_streams()
        self._deliver_deltas()
        self.is_stuck = self.is_stuck and bool(self._active_requests)
        if self._active_requests:
            result = self._step()
            self._deliver_deltas(result.requests)

    def compute_wait(self) -> float | None:
        """Compute the seconds until the loop has work without a command. None = only a command brings work."""
        if self._ended_requests:
            return 0
        if not self._active_requests:
            return None
        is_paused = len(self._paused_streams) > 0 and all(
            entry.stream in self._paused_streams for entry in self._active_requests.values()
        )
        if not is_paused and not self.is_stuck:
            return 0
        next_stall = min(self._paused_streams.values(), default=math.inf) + self.limits.stall_after
        wait = max(min(next_stall, self._next_deadline) - self._clock(), MIN_WAIT_SECONDS)
        return min(wait, IDLE_POLL_SECONDS) if self.is_stuck else min(wait, MAX_WAIT_SECONDS)

    def add(self, stream: Stream, deadline: float) -> None:
        """Add the requests of a stream to the engine; a request that the engine refuses ends with an error."""
        start_deadline = self._clock() + self.limits.queue_timeout
        for transcript in stream.transcripts:
            self._active_requests[transcript.request] = ActiveRequest(transcript, stream, deadline, start_deadline)
            try:
                self.engine.add(transcript)
            except ForedraftError as error:
                transcript.fail("error", str(error))
                self._ended_requests.append(transcript.request)
        self._next_deadline = min(self._next_deadline, deadline, start_deadline)

    def abort(self, stream: Stream, error: str | None) -> None:
        """End the requests of a stream that have not ended, with finish reason "abort"."""
        for transcript in stream.transcripts:
            self._end_request(transcript.request, "abort", error)

    def _end_request(self, request: Request, reason: FinishReason, error: str | None) -> None:
        if request in self._active_requests:
            self.engine.abort(request, reason, error)
            self._ended_requests.append(request)

    def end_all(self, reason: FinishReason, error: str) -> None:
        """End all active requests."""
        for request in list(self._active_requests):
            self._end_request(request, reason, error)

    def _expire_requests(self) -> None:
        now = self._clock()
        if now < self._next_deadline:
            return
        self._next_deadline = math.inf
        for request, entry in list(self._active_requests.items()):
            if request.slot >= 0 or request.output:
                entry.start_deadline = math.inf
            if now >= entry.deadline:
                num_tokens = entry.transcript.num_tokens
                state = "was waiting to run" if request.slot < 0 else f"had {num_tokens} output tokens"
                self._end_request(request, "abort", f"the deadline passed; the request {state}")
            elif now >= entry.start_deadline:
                self._end_request(
                    request, "abort", f"not started within {self.limits.queue_timeout:g} s: too many requests"
                )
            else:
                self._next_deadline = min(self._next_deadline, entry.deadline, entry.start_deadline)

    def _check_paused_streams(self) -> None:
        """Resume streams whose reader has caught up; abort those that have paused for `stall_after` seconds."""
        now = self._clock() if self._paused_streams else 0.0
        for stream, since in list(self._paused_streams.items()):
            if stream.backlog <= self.limits.max_buffered // 2:
                stream.is_paused = False
                del self._paused_streams[stream]
            elif now - since >= self.limits.stall_after:
                self.abort(stream, f"the client read nothing for {self.limits.stall_after:g} s")
                del self._paused_streams[stream]

    def _step(self) -> StepResult:
        """Run one step of the engine; recover if it raises. Returns `NO_STEP` if no step succeeded."""
        live = [request for request, entry in self._active_requests.items() if entry.stream not in self._paused_streams]
        if not live:
            self.is_stuck = False  # all streams are paused, which is no fault of the scheduler
            return NO_STEP
        allowed = self._fault_isolator.select(live)
        if allowed is None and self._paused_streams:
            allowed = frozenset(live)
        result, loss = None, None
        try:
            result = self.engine.step(allowed)
        except TargetLostError as error:
            loss = str(error)
        except Exception:
            log.exception("a step failed; its requests are computed again")
        if result is None:  # outside the except block, so that the traceback no longer holds the step's tensors
            self._recover(loss)
            return NO_STEP
        self._fault_isolator.on_success(result.requests, result.progressed)
        self.is_stuck = not result.requests
        self.is_broken = self.is_broken and not result.progressed
        report = result.report
        if report is not None:
            self._notify(lambda observer: observer.on_step(result.requests, report))
        return result

    def _recover(self, loss: str | None) -> None:
        """Restore the engine after a failed step, and end the culprit, or all requests if engine or target are lost."""
        self._notify(lambda observer: observer.on_failure("step"))
        step_requests = self.engine.current_requests or tuple(self._active_requests)
        culprit = self._fault_isolator.on_failure(step_requests)
        self.engine.recover()
        self._ended_requests = list(self._active_requests)  # `recover` may have ended any of them
        if loss is not None or self._fault_isolator.is_engine_fault(step_requests, self._active_requests):
            log.error("%s", loss or f"{self._fault_isolator.num_resets} steps failed in a row; every request is ended")
            self.is_broken = True
            self._notify(lambda observer: observer.on_failure("engine"))
            self.end_all("error", loss or ENGINE_FAULT_ERROR)
        elif culprit is not None:
            self._notify(lambda observer: observer.on_failure("request"))
            self._end_request(culprit, "error", REQUEST_FAULT_ERROR)

    def _deliver_deltas(self, step_requests: Sequence[Request] = ()) -> None:
        """Send new deltas to their event loops, one wake-up per loop, and remove the requests that ended.

        Args:
            step_requests: requests of the last step. Those that ended outside a step are added.
        """
        parcels: dict[asyncio.AbstractEventLoop, list[tuple[Stream, list[Delta]]]] = {}
        finished: list[ActiveRequest] = []
        for request in (*step_requests, *self._ended_requests):
            entry = self._active_requests.get(request)
            if entry is None or not entry.transcript.deltas:
                continue
            stream, deltas = entry.stream, list(entry.transcript.deltas)
            entry.transcript.deltas.clear()
            stream.bytes_sent += sum(map(estimate_bytes, deltas))
            parcels.setdefault(stream.loop, []).append((stream, deltas))
            if entry.transcript.is_finished:
                del self._active_requests[request]
                finished.append(entry)
            self._pause_if_behind(stream)
        self._ended_requests = []
        for entry in finished:  # before the last delta is sent, so that a client that has it finds its request counted
            self._notify(lambda observer, transcript=entry.transcript: observer.on_finish(transcript))  # type: ignore[misc]
        for loop, parcel in parcels.items():
            try:
                loop.call_soon_threadsafe(deliver_deltas, parcel)
            except RuntimeError:  # the event loop is closed: these streams have no reader any more
                for stream, _ in parcel:
                    self.abort(stream, None)
        for entry in finished:
            self._on_request_end(entry.stream)

    def _pause_if_behind(self, stream: Stream) -> None:
        """Pause the requests of a stream with too many unread bytes."""
        if stream.backlog > self.limits.max_buffered and stream not in self._paused_streams:
            # Set the flag before the backlog is read again: the reader updates its count before it checks the flag.
            stream.is_paused = True
            if stream.backlog > self.limits.max_buffered // 2:
                self._paused_streams[stream] = self._clock()

    def _notify(self, call: Callable[[EngineObserver], None]) -> None:
        """Call the observer, if there is one; log its exceptions."""
        if self.observer is not None:
            try:
                call(self.observer)
            except Exception:
                log.exception("an observer failed; ignored")
