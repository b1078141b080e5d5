"""Reader side of a submission to a Worker: deltas from the engine's thread, awaited on an event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any

from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError
from foredraft.outputs import Completion, Delta

DELTA_BYTES = 400  # bytes of a delta without its tokens and text, measured on a delta of one token
TOKEN_BYTES = 100  # bytes per token of a delta
CHAR_BYTES = 4  # bytes per character of its text, at most


def estimate_bytes(delta: Delta) -> int:
    """Estimate the memory of a delta in bytes."""
    return DELTA_BYTES + TOKEN_BYTES * len(delta.token_ids) + CHAR_BYTES * len(delta.text)


class Stream:
    """Async iterator over the deltas of all requests of one submission; ends when each has finished.

    It belongs to the event loop it was created on, and one task reads it. `cancel` may be called from any thread, any
    number of times; unfinished requests then end with finish_reason "abort". Iteration raises ForedraftError if the
    engine's thread ended before the requests did.
    """

    def __init__(
        self, transcripts: Sequence[Transcript], cancel: Callable[["Stream"], None], resume: Callable[[], None]
    ) -> None:
        self.transcripts = tuple(transcripts)
        self.loop = asyncio.get_running_loop()
        # Each counter is written by one thread only, so that neither needs a lock.
        self.bytes_sent = 0  # bytes of deltas from the engine's thread, which writes it
        self.is_paused = False  # the requests are paused until the reader catches up
        self._bytes_read = 0  # bytes of deltas that the reader took; written on the event loop
        self._cancel = cancel
        self._resume = resume
        self._buffer: deque[Delta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._num_unfinished = len(self.transcripts)
        self._error: str | None = None

    @property
    def backlog(self) -> int:
        """Bytes sent by the engine's thread and not yet read."""
        return self.bytes_sent - self._bytes_read

    def cancel(self) -> None:
        """Abort the requests that have not ended, before the next step."""
        self._cancel(self)

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Delta:
        while not self._buffer:
            if self._error is not None:
                raise ForedraftError(self._error)
            if not self._num_unfinished:
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        delta = self._buffer.popleft()
        self._bytes_read += estimate_bytes(delta)
        if self.is_paused:
            self._resume()
        return delta

    def read_completions(self) -> Coroutine[Any, Any, list[Completion]]:
        """Read to the end and return one completion per transcript, in order.

        An exception cancels the requests. This includes the cancellation of a task that has not begun to read.
        """
        return _Reading(self)

    async def _read_completions(self) -> list[Completion]:
        completions = {delta.index: delta.completion async for delta in self if delta.completion is not None}
        return [completions[transcript.index] for transcript in self.transcripts]

    def receive(self, deltas: Sequence[Delta]) -> None:
        """Append deltas of the engine's thread. Runs on the event loop."""
        self._buffer.extend(deltas)
        self._num_unfinished -= sum(delta.completion is not None for delta in deltas)
        self._wake()

    def close(self, error: str) -> None:
        """End the stream with an error, because no more deltas will come. Runs on the event loop."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Reading(Coroutine[Any, Any, list[Completion]]):
    """Coroutine of `Stream.read_completions`.

    A task that is cancelled before its first step runs no line of an `async def`, so its `except` could not cancel the
    requests.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._coroutine = stream._read_completions()

    def send(self, value: Any) -> Any:
        return self._run(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._run(self._coroutine.throw, *error)

    def close(self) -> None:
        self._stream.cancel()
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, list[Completion]]:
        try:
            return (yield from self._coroutine.__await__())
        except BaseException:
            self._stream.cancel()
            raise

    def _run(self, advance: Callable[..., Any], *args: Any) -> Any:
        try:
            return advance(*args)
        except StopIteration:
            raise
        except BaseException:
            self._stream.cancel()
            raise


def deliver_deltas(parcels: Sequence[tuple[Stream, Sequence[Delta]]]) -> None:
    """Pass the deltas of one step to their streams. Runs on the event loop of these streams."""
    for stream, deltas in parcels:
        stream.receive(deltas)
