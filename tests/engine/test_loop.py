"""The end of a request in the engine's loop: counted, then sent, then no longer open.

Fault: the last delta was sent before the observer counted the end, so a client could read metrics without its request.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from foredraft.engine.loop import EngineLoop, WorkerLimits
from foredraft.engine.stream import Stream
from foredraft.engine.transcript import Transcript
from foredraft.sampling.params import Sampling
from tests.support import engine_fakes
from tests.support.engine_fakes import TableLM

LM = TableLM.from_seed(61, seed=3)
SAMPLING = Sampling(max_tokens=3, temperature=0, ignore_eos=True)


class RecordingLoop:
    """An event loop that records the ends sent to it."""

    def __init__(self, events: list[str], is_closed: bool) -> None:
        self.events, self.is_closed = events, is_closed

    def call_soon_threadsafe(self, function: Callable[..., None], parcels: Any) -> None:
        if self.is_closed:
            raise RuntimeError("the event loop is closed")
        self.events += ["sent" for _, deltas in parcels for delta in deltas if delta.completion is not None]


class RecordingObserver:
    """An observer that records the ends it counts, and may fail there."""

    def __init__(self, events: list[str], is_broken: bool) -> None:
        self.events, self.is_broken = events, is_broken

    def on_step(self, requests: object, report: object) -> None:
        pass

    def on_finish(self, transcript: Transcript) -> None:
        self.events.append("counted")
        assert transcript.is_finished
        if self.is_broken:
            raise RuntimeError("metrics")

    def on_failure(self, kind: str) -> None:
        pass


@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.parametrize("end", ["step", "abort", "closed", "broken"])
def test_an_end_is_counted_before_it_is_sent(end: str, num_requests: int) -> None:
    """It may come from a step or an abort; a closed event loop or a broken observer changes nothing for the others."""
    events: list[str] = []

    async def run() -> None:
        transcripts = [engine_fakes.make_transcript([5, n + 1], SAMPLING, n) for n in range(num_requests)]
        stream = Stream(transcripts, lambda stream: None, lambda: None)
        stream.loop = RecordingLoop(events, end == "closed")  # type: ignore[assignment]
        engine = engine_fakes.make_engine(LM, None)
        loop = EngineLoop(
            engine, WorkerLimits(), RecordingObserver(events, end == "broken"), lambda: 0.0,
            lambda stream: events.append("ended"),
        )  # fmt: skip
        loop.add(stream, math.inf)
        if end == "abort":
            loop.run_once()
            assert events == []
            loop.abort(stream, None)
        while loop.compute_wait() is not None:
            loop.run_once()
        assert not engine.has_work

    asyncio.run(run())
    sent = [] if end == "closed" else ["sent"] * num_requests
    assert events == ["counted"] * num_requests + sent + ["ended"] * num_requests
