"""Generation of one HTTP request: its deltas from the worker, with latency metrics and cancellation."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError
from foredraft.outputs import Completion, Delta
from foredraft.server.errors import ApiError
from foredraft.server.metrics import ServerMetrics


class Generation:
    """Deltas and completions of all transcripts of one HTTP request.

    Args:
        stream: stream of the worker.
        metrics: receives the time to the first token and between tokens.
        start_time: arrival of the HTTP request, in seconds of time.monotonic.
    """

    def __init__(self, stream: Any, metrics: ServerMetrics, start_time: float) -> None:
        self.transcripts: Sequence[Transcript] = stream.transcripts
        self.completions: dict[int, Completion] = {}
        self._stream, self._metrics, self._start_time = stream, metrics, start_time
        self._last_delta_times: dict[int, float] = {}

    async def read_deltas(self) -> AsyncIterator[Delta]:
        """Yield the deltas. Raises ApiError if the engine's thread has ended."""
        try:
            async for delta in self._stream:
                self._record_delta(delta)
                yield delta
        except ForedraftError as error:
            raise ApiError(500, str(error)) from None

    def cancel(self) -> None:
        """Abort the requests that have not ended. May be called any number of times."""
        if len(self.completions) < len(self.transcripts):
            self._stream.cancel()

    def _record_delta(self, delta: Delta) -> None:
        if delta.completion is not None:
            self.completions[delta.index] = delta.completion
        if not delta.token_ids:
            return
        now, last = time.monotonic(), self._last_delta_times.get(delta.index)
        self._last_delta_times[delta.index] = now
        if last is None:
            self._metrics.record_first_token(now - self._start_time)
        else:
            self._metrics.record_tokens(now - last, len(delta.token_ids))
