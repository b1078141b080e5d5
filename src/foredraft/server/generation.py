"""One HTTP request at work: its transcripts on the worker, its deltas counted, its end whatever happens."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from foredraft.completion import Completion, Delta
from foredraft.engine.output import Transcript
from foredraft.errors import ForedraftError
from foredraft.server.errors import ApiError
from foredraft.server.metrics import Metrics


class Generation:
    """The deltas of all transcripts of one HTTP request."""

    def __init__(self, stream: Any, metrics: Metrics, began: float) -> None:
        self.transcripts: Sequence[Transcript] = stream.transcripts
        self.completions: dict[int, Completion] = {}
        self._stream, self._metrics, self._began = stream, metrics, began
        self._last: dict[int, float] = {}

    async def deltas(self) -> AsyncIterator[Delta]:
        """Raises ApiError if the engine is gone."""
        try:
            async for delta in self._stream:
                self._note(delta)
                yield delta
        except ForedraftError as error:
            raise ApiError(500, str(error)) from None

    def cancel(self) -> None:
        """Whatever has not ended yet is aborted; any number of times."""
        if len(self.completions) < len(self.transcripts):
            self._stream.cancel()

    def _note(self, delta: Delta) -> None:
        if delta.completion is not None:
            self.completions[delta.index] = delta.completion
        if not delta.token_ids:
            return
        now, last = time.monotonic(), self._last.get(delta.index)
        self._last[delta.index] = now
        if last is None:
            self._metrics.first_token(now - self._began)
        else:
            self._metrics.more_tokens(now - last, len(delta.token_ids))
