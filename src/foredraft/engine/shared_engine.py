"""One engine shared by the threads and event loops that read from it; there is no engine thread.

    reader A  --take-->  [ one at a time: join and leave, recover, step ]  --deltas of A and B, on their transcripts
    reader B  --take-->  waits; finds its deltas there, or runs the next step

A reader without a new delta runs one step for all requests. The engine is free while a reader handles its deltas.
A claim guards the engine instead of a lock, because a thread that takes a lock again at once starves the waiting ones.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from foredraft.engine.engine import Engine
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError
from foredraft.kernels.process import is_forked
from foredraft.outputs import Delta
from foredraft.request import Request

CLOSED_ERROR = "this LLM is closed; make another one"
T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class DeltaReader:
    """Requests of one call that have not ended or have deltas that were not taken."""

    transcripts: list[Transcript] = field(default_factory=list)

    @property
    def requests(self) -> frozenset[Request]:
        return frozenset(transcript.request for transcript in self.transcripts)

    @property
    def has_deltas(self) -> bool:
        return any(transcript.deltas for transcript in self.transcripts)

    def take_deltas(self) -> list[Delta]:
        deltas: list[Delta] = []
        for transcript in self.transcripts:
            deltas += transcript.deltas
            transcript.deltas.clear()
        self.transcripts = [transcript for transcript in self.transcripts if not transcript.is_finished]
        return deltas


class SharedEngine:
    """Engine for readers on several threads. Every method may be called from any thread.

    A step that raises does so in the thread that ran it. The next user of the engine recovers it. Then each other
    reader runs alone until it has a token, so that a request that makes steps fail raises in its own reader. The same
    holds for an interrupt (KeyboardInterrupt) at any line.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        # These fields are guarded by `_condition`.
        self._condition = threading.Condition()
        self._owner: object | None = None  # claim of the thread that uses the engine now
        self._readers: set[DeltaReader] = set()
        self._waiting: set[DeltaReader] = set()  # readers that wait for the engine
        self._joining: deque[DeltaReader] = deque()  # not in the engine yet
        self._leaving: deque[DeltaReader] = deque()  # may still be in the engine
        self._is_closed = False
        # These fields are used under the claim.
        self._needs_recovery = False  # an operation on the engine was interrupted
        self._isolated_readers: set[DeltaReader] = set()  # readers that run alone after another reader's step raised
        self._executor = ThreadPoolExecutor(1, "foredraft-async")  # one thread that steps for all event loops

    def check(self) -> None:
        """Raise ForedraftError if this object is closed or a Worker owns the engine."""
        if self._is_closed:
            raise ForedraftError(CLOSED_ERROR)
        if self.engine.is_reserved:
            raise ForedraftError("a Worker runs this LLM; submit to it, or stop it first, or use with_drafter's LLM")

    def read(self, transcripts: Sequence[Transcript]) -> Iterator[Delta]:
        """Yield the deltas of the requests, which start at the first `next`.

        Closing the iterator early aborts the requests that have not ended.
        """
        reader = DeltaReader(list(transcripts))
        try:
            self._add_reader(reader)
            while reader.transcripts:
                yield from self._take_deltas(reader)
        finally:
            self._remove_readers([reader])

    async def read_async(self, transcripts: Sequence[Transcript]) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of the requests on an event loop; the steps run on a thread."""
        reader = DeltaReader(list(transcripts))
        try:
            self._add_reader(reader)
            while reader.transcripts:
                for delta in await self._run_on_thread(self._take_deltas, reader):
                    yield delta
        finally:
            await asyncio.shield(self._run_on_thread(self._remove_readers, [reader]))

    @contextmanager
    def claim_engine(self) -> Iterator[Engine]:
        """Claim exclusive use of the engine, between two steps of the readers."""
        claim = object()
        try:
            self._acquire(claim, None)
            self._apply_pending()
            yield self.engine
        finally:
            self._release(claim)

    def close(self) -> None:
        """End every reader; further reads raise ForedraftError. Does not wait for a step that is running."""
        if not self._is_closed:
            self.check()
            self._is_closed = True
            self._remove_readers(list(self._readers))

    def _run_on_thread(self, function: Callable[[T], R], argument: T) -> "asyncio.Future[R]":
        return asyncio.wrap_future(self._executor.submit(function, argument))

    def _add_reader(self, reader: DeltaReader) -> None:
        with self._condition:
            self._readers.add(reader)
            self._joining.append(reader)

    def _take_deltas(self, reader: DeltaReader) -> list[Delta]:
        """Take the new deltas of a reader, after one step if it has none. The result may be empty."""
        claim = object()
        try:
            self._acquire(claim, reader)
            self._apply_pending()
            if reader not in self._readers:
                return []
            if not reader.has_deltas:
                self._step(reader)
            return reader.take_deltas()
        finally:
            self._release(claim)

    def _acquire(self, claim: object, reader: DeltaReader | None) -> None:
        """Wait until the engine is free and no other waiting reader has deltas to take."""
        with self._condition:
            if self._owner is not None or self._waiting:
                self._wait_for_turn(reader)
            self._owner = claim
        self.check()

    def _wait_for_turn(self, reader: DeltaReader | None) -> None:
        """Wait on the condition, listed in `_waiting` meanwhile."""
        try:
            if reader is not None:
                self._waiting.add(reader)
            while self._owner is not None or self._has_waiting_deltas(reader):
                self._condition.wait()
        finally:
            if reader is not None:
                self._waiting.discard(reader)

    def _has_waiting_deltas(self, reader: DeltaReader | None) -> bool:
        """Return True if another waiting reader has deltas to take and this one has none: it goes first."""
        if reader is not None and reader.has_deltas:
            return False
        return any(other.has_deltas for other in self._waiting)

    def _apply_pending(self) -> None:
        """Recover the engine if needed, add joining readers, abort leaving ones. Safe to repeat after an interrupt."""
        if self._needs_recovery:
            self.engine.recover()
        if not self._joining and not self._leaving:
            self._needs_recovery = False
            return
        self._needs_recovery = True
        while self._joining:
            reader = self._joining[0]
            for transcript in reader.transcripts if reader in self._readers else ():
                if transcript.request not in self.engine.transcripts:
                    self.engine.add(transcript)
            self._joining.popleft()
        while self._leaving:
            for transcript in self._leaving[0].transcripts:
                self.engine.abort(transcript.request)
            self._leaving.popleft()
        self._needs_recovery = False

    def _step(self, reader: DeltaReader) -> None:
        """Run one step for a reader; if it raises, isolate all other readers."""
        self._needs_recovery = True
        try:
            result = self.engine.step(self._select_requests(reader))
        except BaseException:
            self._isolated_readers = self._readers - {reader}
            raise
        self._needs_recovery = False
        if reader.has_deltas:
            self._isolated_readers.discard(reader)
        elif not result.requests:  # isolated requests wait for each other: run them together
            self._isolated_readers.clear()

    def _select_requests(self, reader: DeltaReader) -> frozenset[Request] | None:
        """Select the requests that may run in a reader's step. None = all."""
        suspects = self._isolated_readers & self._readers
        if not suspects:
            return None
        if reader in suspects:
            return reader.requests
        return frozenset(self.engine.transcripts).difference(*(suspect.requests for suspect in suspects))

    def _remove_readers(self, readers: Sequence[DeltaReader]) -> None:
        """Abort the requests of readers, now if the engine is free, else when its owner releases it.

        Never waits for a step: the garbage collector may call this in the middle of one.
        """
        if is_forked():  # readers and claim belong to the parent process
            return
        claim = object()
        try:
            with self._condition:
                self._leaving.extend(readers)
                self._readers.difference_update(readers)
                self._isolated_readers.difference_update(readers)
                if self._owner is None:
                    self._owner = claim
        finally:
            self._release(claim)

    def _release(self, claim: object) -> None:
        """Remove the readers that left meanwhile, then release the engine."""
        try:
            while True:
                with self._condition:
                    if self._owner is not claim or not self._leaving:
                        self._clear_owner(claim)
                        return
                self._apply_pending()
        except BaseException:
            with self._condition:
                self._clear_owner(claim)
            raise

    def _clear_owner(self, claim: object) -> None:
        if self._owner is claim:
            self._owner = None
        self._condition.notify_all()
