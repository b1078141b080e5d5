"""The reader's end of a submission: deltas from the engine's thread, awaited on an event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from foredraft.completion import Completion, Delta
from foredraft.engine.output import Transcript
from foredraft.errors import ForedraftError

DELTA_BYTES = 400  # what a delta takes in memory beside its text: measured on a delta of one token
TOKEN_BYTES = 100


def size_of(delta: Delta) -> int:
    """Bytes, about."""
    return DELTA_BYTES + TOKEN_BYTES * len(delta.token_ids) + 4 * len(delta.text)


class Stream:
    """An async iterator over the deltas of all transcripts of one submission; ends when each has finished.

    Belongs to the event loop it was made on: one task reads it. `cancel` may be called from any thread, at any time and
    again; the rest of the texts then ends with finish_reason "abort". Iterating raises ForedraftError if the engine's
    thread ended without finishing the texts.
    """

    def __init__(
        self, transcripts: Sequence[Transcript], cancel: Callable[["Stream"], None], resume: Callable[[], None]
    ) -> None:
        self.transcripts = tuple(transcripts)
        self.loop = asyncio.get_running_loop()
        # Each counter has one thread that writes it, so that neither needs a lock.
        self.given = 0  # bytes the engine's thread handed over
        self.is_held = False  # the engine's thread waits for the reader
        self._taken = 0  # bytes the reader took; written on the loop
        self._cancel = cancel
        self._resume = resume
        self._buffer: deque[Delta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._unfinished = len(self.transcripts)
        self._error: str | None = None

    @property
    def backlog(self) -> int:
        """Bytes handed over and not yet read, wherever they are."""
        return self.given - self._taken

    def cancel(self) -> None:
        self._cancel(self)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Delta:
        while not self._buffer:
            if self._error is not None:
                raise ForedraftError(self._error)
            if not self._unfinished:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta = self._buffer.popleft()
        self._taken += size_of(delta)
        if self.is_held:
            self._resume()
        return delta

    async def completions(self) -> list[Completion]:
        """Read to the end: one completion per transcript, in order. Leaving early cancels the rest."""
        done: dict[int, Completion] = {}
        try:
            async for delta in self:
                if delta.completion is not None:
                    done[delta.index] = delta.completion
        except BaseException:
            self.cancel()
            raise
        return [done[transcript.index] for transcript in self.transcripts]

    def receive(self, deltas: Sequence[Delta]) -> None:
        """On the loop: what the engine's thread sends."""
        self._buffer.extend(deltas)
        self._unfinished -= sum(delta.completion is not None for delta in deltas)
        self._wake()

    def close(self, error: str) -> None:
        """On the loop: nothing more will come."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def deliver(parcels: Sequence[tuple[Stream, Sequence[Delta]]]) -> None:
    """On their loop: everything one step has for its streams."""
    for stream, deltas in parcels:
        stream.receive(deltas)
