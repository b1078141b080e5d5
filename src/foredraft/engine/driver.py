"""What the engine's thread does between two commands: steps, delivers, ends what must end. One thread, no locks."""

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from foredraft.completion import Delta, FinishReason
from foredraft.controller import StepReport
from foredraft.engine.engine import Engine
from foredraft.engine.guard import TIMEOUT
from foredraft.engine.output import Transcript
from foredraft.engine.stream import Stream, deliver, size_of
from foredraft.engine.suspects import Suspects
from foredraft.errors import ForedraftError
from foredraft.request import Request

log = logging.getLogger(__name__)
CULPRIT = "the model failed on this request; it was ended so that the others could go on"
HOPELESS = "the engine failed again and again, and what it ran was ended"
NAP = 0.005  # seconds until the next look where requests are there and the scheduler runs none of them
LONGEST_WAIT = 3600.0  # for a command, where nothing else can happen: what queues take is bounded


@dataclass(frozen=True)
class WorkerLimits:
    max_queue: int = 256  # requests that wait to run
    queue_timeout: float = math.inf  # seconds a request may wait until it first runs
    hang_after: float = 10.0  # seconds without a finished step, with work to do, until the worker is not healthy
    max_buffered: int = 1 << 20  # bytes, about, that a stream's reader may be behind; then its requests pause
    stall_after: float = 30.0  # seconds that they pause before they are aborted
    drafter_timeout: float = TIMEOUT  # seconds one proposal may take; longer ones count as failures of the drafter


class Observer(Protocol):
    """Told what happens, on the engine's thread, which waits: be quick. What it raises is logged and dropped."""

    def stepped(self, engine: Engine, report: StepReport) -> None:
        """After every step that ran something."""

    def finished(self, transcript: Transcript) -> None:
        """After every request, whatever its end."""

    def failed(self, what: str) -> None:
        """`step`: one raised and is taken back; `request`: one was ended with an error for it; `engine`: too many in
        a row, and all were."""


@dataclass(eq=False)
class Entry:
    """One request that has not ended."""

    transcript: Transcript
    stream: Stream
    deadline: float
    start_by: float


class Driver:
    """The requests that have not ended, and everything that befalls them.

    `left` is told of every request that ended, once its last delta is on its way. All times are of `clock`.
    """

    def __init__(
        self,
        engine: Engine,
        limits: WorkerLimits,
        observer: Observer | None,
        clock: Callable[[], float],
        left: Callable[[Stream], None],
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.observer = observer
        self.is_broken = False  # too many steps failed, and none went well since
        self.is_stuck = False  # the last step found nobody to run
        self._clock = clock
        self._left = left
        self._entries: dict[Request, Entry] = {}  # oldest first
        self._ended: list[Request] = []  # by us, since the last delivery
        self._held: dict[Stream, float] = {}  # readers that are too far behind -> since when
        self._suspects = Suspects()
        self._next_deadline = math.inf

    def turn(self) -> None:
        """A step, if there is anything to step, and all that goes with it."""
        self._expire()
        self._hold()
        self._deliver()
        self.is_stuck = self.is_stuck and bool(self._entries)
        if self._entries:
            self._step()
            self._deliver()

    def wait(self) -> float | None:
        """Seconds until there is something to do without a command; None = until one comes."""
        if self._ended:
            return 0
        if not self._entries:
            return None
        is_paused = len(self._held) > 0 and all(entry.stream in self._held for entry in self._entries.values())
        if not is_paused and not self.is_stuck:
            return 0
        stalls = min(self._held.values(), default=math.inf) + self.limits.stall_after
        wait = max(min(stalls, self._next_deadline) - self._clock(), 0.001)
        return min(wait, NAP) if self.is_stuck else min(wait, LONGEST_WAIT)

    def add(self, stream: Stream, deadline: float) -> None:
        start_by = self._clock() + self.limits.queue_timeout
        for transcript in stream.transcripts:
            self._entries[transcript.request] = Entry(transcript, stream, deadline, start_by)
            try:
                self.engine.add(transcript)
            except ForedraftError as error:
                transcript.fail("error", str(error))
                self._ended.append(transcript.request)
        self._next_deadline = min(self._next_deadline, deadline, start_by)

    def abort(self, stream: Stream, why: str | None) -> None:
        for transcript in stream.transcripts:
            self._end(transcript.request, "abort", why)

    def _end(self, request: Request, reason: FinishReason, why: str | None) -> None:
        if request in self._entries:
            self.engine.abort(request, reason, why)
            self._ended.append(request)

    def end_all(self, reason: FinishReason, why: str) -> None:
        for request in list(self._entries):
            self._end(request, reason, why)

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_deadline:
            return
        self._next_deadline = math.inf
        for request, entry in list(self._entries.items()):
            if request.slot >= 0 or request.output:
                entry.start_by = math.inf
            if now >= entry.deadline:
                state = "still waiting to run" if request.slot < 0 else f"{entry.transcript.num_tokens} tokens long"
                self._end(request, "abort", f"the deadline passed; the text was {state}")
            elif now >= entry.start_by:
                self._end(request, "abort", f"not begun within {self.limits.queue_timeout:g} s: too many requests")
            else:
                self._next_deadline = min(self._next_deadline, entry.deadline, entry.start_by)

    def _hold(self) -> None:
        """Let go on who was read from; end those whose reader has not come back."""
        now = self._clock() if self._held else 0.0
        for stream, since in list(self._held.items()):
            if stream.backlog <= self.limits.max_buffered // 2:
                stream.is_held = False
                del self._held[stream]
            elif now - since >= self.limits.stall_after:
                self.abort(stream, f"the reader took nothing for {self.limits.stall_after:g} s")
                del self._held[stream]

    def _step(self) -> None:
        """One step; one that raises is taken back."""
        live = [request for request, entry in self._entries.items() if entry.stream not in self._held]
        if not live:
            self.is_stuck = False  # every reader is waited for: nothing is wrong
            return
        only = self._suspects.choose(live)
        if only is None and self._held:
            only = frozenset(live)
        try:
            self.engine.step(only)
            is_good = True
        except Exception:
            log.exception("a step failed; its requests are computed again")
            is_good = False
        if not is_good:  # out here, where the traceback no longer holds what the step had made
            self._recover()
            return
        tried = self.engine.tried
        scored = [r for r in tried if r in self._entries and self._entries[r].transcript.deltas]
        self._suspects.passed(tried, scored)
        self.is_stuck = not tried
        self.is_broken = self.is_broken and not scored
        report = self.engine.last
        if report is not None and tried:
            self._tell(lambda observer: observer.stepped(self.engine, report))

    def _recover(self) -> None:
        self._tell(lambda observer: observer.failed("step"))
        tried = self.engine.tried or tuple(self._entries)
        culprit = self._suspects.failed(tried)
        self.engine.recover()
        self._ended = list(self._entries)  # it may have ended any of them
        if self._suspects.is_hopeless(tried, self._entries):
            log.error("%d steps failed in a row; every request is ended", self._suspects.num_resets)
            self.is_broken = True
            self._tell(lambda observer: observer.failed("engine"))
            self.end_all("error", HOPELESS)
        elif culprit is not None:
            self._tell(lambda observer: observer.failed("request"))
            self._end(culprit, "error", CULPRIT)

    def _deliver(self) -> None:
        """Hand over what is new, and take leave of the requests that ended."""
        parcels: dict[asyncio.AbstractEventLoop, list[tuple[Stream, list[Delta]]]] = {}
        finished: list[Entry] = []
        for request in (*self.engine.tried, *self._ended):
            entry = self._entries.get(request)
            if entry is None or not entry.transcript.deltas:
                continue
            stream, deltas = entry.stream, list(entry.transcript.deltas)
            entry.transcript.deltas.clear()
            stream.given += sum(map(size_of, deltas))
            parcels.setdefault(stream.loop, []).append((stream, deltas))
            if entry.transcript.is_finished:
                del self._entries[request]
                finished.append(entry)
            self._watch(stream)
        self._ended = []
        for loop, parcel in parcels.items():
            try:
                loop.call_soon_threadsafe(deliver, parcel)
            except RuntimeError:  # the loop is closed: nobody reads these any more
                for stream, _ in parcel:
                    self.abort(stream, None)
        for entry in finished:
            self._left(entry.stream)
            self._tell(lambda observer, transcript=entry.transcript: observer.finished(transcript))  # type: ignore[misc]

    def _watch(self, stream: Stream) -> None:
        """Pause the requests of a reader that is too far behind."""
        if stream.backlog > self.limits.max_buffered and stream not in self._held:
            stream.is_held = True  # first: the reader looks at it after it has counted what it took
            if stream.backlog > self.limits.max_buffered // 2:
                self._held[stream] = self._clock()

    def _tell(self, say: Callable[[Observer], None]) -> None:
        if self.observer is not None:
            try:
                say(self.observer)
            except Exception:
                log.exception("an observer failed; ignored")
