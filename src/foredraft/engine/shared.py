"""One engine for any number of threads and event loops, without a thread of its own for those that wait in line.

    reader A  --take-->  [ one at a time: join and leave, recover, step ]  --deltas of A and B, on their transcripts
    reader B  --take-->  waits; finds its deltas there, or does the next step

A reader that lacks a token does a step for all. Nothing is held while a reader looks at its deltas. The engine is used
under a claim, not under a lock: a lock that its holder takes again at once would never come to those who wait for it.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from foredraft.completion import Delta
from foredraft.engine.engine import Engine
from foredraft.engine.output import Transcript
from foredraft.errors import ForedraftError
from foredraft.kernels.process import is_forked
from foredraft.request import Request

CLOSED = "this LLM is closed; make another one"
T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class Reader:
    """The requests of one call that have not ended, or have deltas that were not taken."""

    transcripts: list[Transcript] = field(default_factory=list)

    @property
    def requests(self) -> frozenset[Request]:
        return frozenset(transcript.request for transcript in self.transcripts)

    @property
    def has_deltas(self) -> bool:
        return any(transcript.deltas for transcript in self.transcripts)

    def take(self) -> list[Delta]:
        deltas: list[Delta] = []
        for transcript in self.transcripts:
            deltas += transcript.deltas
            transcript.deltas.clear()
        self.transcripts = [transcript for transcript in self.transcripts if not transcript.is_finished]
        return deltas


class SharedEngine:
    """Steps an engine for the readers of several threads. Every method may be called from any thread.

    A step that raises does so in the thread that did it. Nothing is lost for the others: the next use of the engine
    recovers it first, and then each of them runs by itself until it has a token, so that a request that makes steps
    fail is met by its own reader. The same holds for an interrupt (KeyboardInterrupt) at any line.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._news = threading.Condition()  # of what follows
        self._claim: object | None = None  # of who uses the engine now
        self._readers: set[Reader] = set()
        self._waiting: set[Reader] = set()
        self._joined: deque[Reader] = deque()  # not in the engine yet
        self._left: deque[Reader] = deque()  # still in the engine, maybe
        self._is_closed = False
        # of who has the claim
        self._is_torn = False  # the engine was left in the middle of something
        self._suspects: set[Reader] = set()  # were there when a step of another's raised
        self._async = ThreadPoolExecutor(1, "foredraft-async")  # one thread: it steps for all

    def check(self) -> None:
        """Raises ForedraftError if the engine must not be used this way."""
        if self._is_closed:
            raise ForedraftError(CLOSED)
        if self.engine.is_reserved:
            raise ForedraftError("a Worker runs this LLM; submit to it, or stop it first, or use with_drafter's LLM")

    def read(self, transcripts: Sequence[Transcript]) -> Iterator[Delta]:
        """Run the requests from the first call of next on; leaving early aborts what is left."""
        reader = Reader(list(transcripts))
        try:
            self._join(reader)
            while reader.transcripts:
                yield from self._take(reader)
        finally:
            self._leave([reader])

    async def read_async(self, transcripts: Sequence[Transcript]) -> AsyncGenerator[Delta, None]:
        """The same for an event loop: the steps are done on a thread."""
        reader = Reader(list(transcripts))
        try:
            self._join(reader)
            while reader.transcripts:
                for delta in await self._on_thread(self._take, reader):
                    yield delta
        finally:
            await asyncio.shield(self._on_thread(self._leave, [reader]))

    @contextmanager
    def claimed(self) -> Iterator[Engine]:
        """The engine for oneself, between two steps of others."""
        claim = object()
        try:
            self._wait(claim, None)
            self._obey()
            yield self.engine
        finally:
            self._release(claim)

    def close(self) -> None:
        """End every reader: those that go on raise. Waits for no step; one under way ends them when it is over."""
        if not self._is_closed:
            self.check()
            self._is_closed = True
            self._leave(list(self._readers))

    def _on_thread(self, what: Callable[[T], R], whom: T) -> "asyncio.Future[R]":
        return asyncio.wrap_future(self._async.submit(what, whom))

    def _join(self, reader: Reader) -> None:
        with self._news:
            self._readers.add(reader)
            self._joined.append(reader)

    def _take(self, reader: Reader) -> list[Delta]:
        """What is new for a reader, after a step where nothing was. That may have brought it nothing either."""
        claim = object()
        try:
            self._wait(claim, reader)
            self._obey()
            if reader not in self._readers:
                return []
            if not reader.has_deltas:
                self._step(reader)
            return reader.take()
        finally:
            self._release(claim)

    def _wait(self, claim: object, reader: Reader | None) -> None:
        """Wait until the engine is free and no other waiting reader has deltas to take."""
        with self._news:
            if self._claim is not None or self._waiting:
                self._queue(reader)
            self._claim = claim
        self.check()

    def _queue(self, reader: Reader | None) -> None:
        try:
            if reader is not None:
                self._waiting.add(reader)
            while self._claim is not None or self._is_owed(reader):
                self._news.wait()
        finally:
            if reader is not None:
                self._waiting.discard(reader)

    def _is_owed(self, reader: Reader | None) -> bool:
        if reader is not None and reader.has_deltas:
            return False
        return any(other.has_deltas for other in self._waiting)

    def _obey(self) -> None:
        """Make the engine whole, take in who joined, end who left. Whatever is interrupted is done again next time."""
        if self._is_torn:
            self.engine.recover()
        if not self._joined and not self._left:
            self._is_torn = False
            return
        self._is_torn = True
        while self._joined:
            reader = self._joined[0]
            for transcript in reader.transcripts if reader in self._readers else ():
                if transcript.request not in self.engine.transcripts:
                    self.engine.add(transcript)
            self._joined.popleft()
        while self._left:
            for transcript in self._left[0].transcripts:
                self.engine.abort(transcript.request)
            self._left.popleft()
        self._is_torn = False

    def _step(self, reader: Reader) -> None:
        self._is_torn = True
        try:
            self.engine.step(self._chosen(reader))
        except BaseException:
            self._suspects = self._readers - {reader}
            raise
        self._is_torn = False
        if reader.has_deltas:
            self._suspects.discard(reader)
        elif not self.engine.tried:  # they wait for each other: together, then
            self._suspects.clear()

    def _chosen(self, reader: Reader) -> frozenset[Request] | None:
        """Who may run in a reader's step; None = all."""
        suspects = self._suspects & self._readers
        if not suspects:
            return None
        if reader in suspects:
            return reader.requests
        return frozenset(self.engine.transcripts).difference(*(suspect.requests for suspect in suspects))

    def _leave(self, readers: Sequence[Reader]) -> None:
        """End them now, or, where another uses the engine, as soon as that is done: this may be called from anywhere,
        by the collector of memory in the middle of a step too, and never waits for one."""
        if is_forked():  # these are the parent's, and so is whoever holds the claim
            return
        claim = object()
        try:
            with self._news:
                self._left.extend(readers)
                self._readers.difference_update(readers)
                self._suspects.difference_update(readers)
                if self._claim is None:
                    self._claim = claim
        finally:
            self._release(claim)

    def _release(self, claim: object) -> None:
        """Let others use the engine, once those that left meanwhile are out of it."""
        try:
            while True:
                with self._news:
                    if self._claim is not claim or not self._left:
                        self._pass_on(claim)
                        return
                self._obey()
        except BaseException:
            with self._news:
                self._pass_on(claim)
            raise

    def _pass_on(self, claim: object) -> None:
        if self._claim is claim:
            self._claim = None
        self._news.notify_all()
