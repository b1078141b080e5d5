"""Drivers of a load: an engine stepped in this thread, the worker of an engine, or a server over HTTP."""

import asyncio
import itertools
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from foredraft.bench.load import (
    SLICE_SECONDS,
    ClosedLoopResult,
    LoadRequest,
    RequestTimeline,
    SlicedLoop,
    run_in_turns,
)
from foredraft.errors import ForedraftError
from foredraft.outputs import Delta, Stats
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling

if TYPE_CHECKING:
    from foredraft.engine.transcript import Transcript
    from foredraft.llm import LLM

REQUEST_TIMEOUT = 600.0  # seconds for one request to a server
MAX_ERROR_CHARS = 300  # of a response body that an error message quotes
IDLE_POLL_SECONDS = 0.001


class PausedClock:
    """Clock that begins at 0 and does not count pauses.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start, self._paused_at = clock(), 0.0

    def read(self) -> float:
        """Return the seconds since the start, without pauses."""
        return self._clock() - self._start

    def pause(self) -> None:
        self._paused_at = self._clock()

    def resume(self) -> None:
        """Leave out the time since `pause`."""
        self._start += self._clock() - self._paused_at


@dataclass
class EngineDriver:
    """Driver that steps the engine in this thread, without a thread or a queue between clock and step.

    Its loops run in slices: several engines can take turns, so that their times are those of the same seconds.
    """

    llm: "LLM"
    sampling: Sampling
    clock: Callable[[], float] = time.perf_counter
    next_salt: Callable[[], bytes] = field(default_factory=lambda: _make_salt_source())

    def run(self, requests: Sequence[LoadRequest], concurrency: int) -> ClosedLoopResult:
        """Run one closed loop to its end."""
        return run_in_turns({"": self.run_slices(requests, concurrency)})[""]

    def run_slices(self, requests: Sequence[LoadRequest], concurrency: int) -> SlicedLoop:
        engine, clock = self.llm.engine, PausedClock(self.clock)
        queue, active, timelines = (
            deque(requests),
            list[tuple["Transcript", RequestTimeline]](),
            list[RequestTimeline](),
        )
        slice_end = SLICE_SECONDS
        while True:
            while queue and len(active) < concurrency:
                timelines.append(RequestTimeline(clock.read()))
                transcript = prepare_transcript(self.llm, queue.popleft(), self.sampling, self.next_salt())
                engine.add(transcript)
                active.append((transcript, timelines[-1]))
            if len(active) < concurrency:
                break
            engine.step()
            now = clock.read()
            for transcript, timeline in active:
                while transcript.deltas:
                    record_delta(transcript.deltas.popleft(), timeline, now)
            active = [pair for pair in active if not pair[0].is_finished]
            if now >= slice_end:
                clock.pause()
                yield
                clock.resume()
                slice_end = now + SLICE_SECONDS
        seconds = clock.read()
        for transcript, timeline in active:
            timeline.stats = transcript.build_stats()
            engine.abort(transcript.request)
        return ClosedLoopResult(seconds, tuple(timelines))

    def close(self) -> None:
        """Do nothing, as the driver holds no resources."""


def prepare_transcript(llm: "LLM", request: LoadRequest, sampling: Sampling, salt: bytes) -> "Transcript":
    """Prepare a request with a salt, so that its prompt has no prefix-cache hit from an earlier round."""
    options = RequestOptions(salt=salt)
    (transcript,) = llm.prepare(list(request.prompt), replace(sampling, max_tokens=request.max_tokens), options)
    return transcript


def record_delta(delta: Delta, timeline: RequestTimeline, now: float) -> None:
    """Record a delta at time `now`.

    Raises:
        ForedraftError: the delta ends a failed request.
    """
    if delta.token_ids:
        timeline.arrivals.append((now, len(delta.token_ids)))
    if delta.completion is not None:
        if delta.completion.error is not None:
            raise ForedraftError(f"a request failed: {delta.completion.error}")
        timeline.stats = delta.completion.stats


def _make_salt_source() -> Callable[[], bytes]:
    """Create a source of distinct salts; salts of two drivers at one server differ too."""
    numbers, prefix = itertools.count(), secrets.token_hex(4)
    return lambda: f"load-{prefix}-{next(numbers)}".encode()


@dataclass(frozen=True)
class StreamDelta:
    """Tokens and statistics of one delta of a stream."""

    num_tokens: int
    stats: Stats | None = None  # with the last delta, if the engine or server sends them


# Opens the stream of a request; closing the iterator early aborts the request.
StreamOpener = Callable[[LoadRequest], AsyncGenerator[StreamDelta, None]]


class AsyncStreamDriver:
    """Driver of a closed loop of asynchronous streams.

    Args:
        session_factory: creates the context of one loop, which yields the opener of its streams.
        clock: returns seconds.
    """

    def __init__(
        self,
        session_factory: Callable[[], AbstractAsyncContextManager[StreamOpener]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session_factory = session_factory
        self._clock = clock

    def run(self, requests: Sequence[LoadRequest], concurrency: int) -> ClosedLoopResult:
        """Run one closed loop to its end."""
        return asyncio.run(self._run_loop(requests, concurrency))

    def run_slices(self, requests: Sequence[LoadRequest], concurrency: int) -> SlicedLoop:
        """Run one closed loop in one slice: its streams are open until the end."""
        yield from ()
        return self.run(requests, concurrency)

    def close(self) -> None:
        """Do nothing, as every loop closes its own session."""

    async def _run_loop(self, requests: Sequence[LoadRequest], concurrency: int) -> ClosedLoopResult:
        queue, timelines = deque(requests), list[RequestTimeline]()
        async with self._session_factory() as opener:
            start = self._clock()
            streams = [asyncio.ensure_future(self._run_stream(opener, queue, timelines)) for _ in range(concurrency)]
            try:
                await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
                seconds = self._clock() - start
            finally:
                for stream in streams:
                    stream.cancel()
                outcomes = await asyncio.gather(*streams, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Exception):  # CancelledError is no Exception
                    raise outcome
        end = start + seconds
        for timeline in timelines:  # drops deltas that arrived during cancellation
            timeline.arrivals = [arrival for arrival in timeline.arrivals if arrival[0] <= end]
        return ClosedLoopResult(seconds, tuple(timelines))

    async def _run_stream(
        self, opener: StreamOpener, queue: deque[LoadRequest], timelines: list[RequestTimeline]
    ) -> None:
        while queue:
            timeline = RequestTimeline(self._clock())
            timelines.append(timeline)
            async with aclosing(opener(queue.popleft())) as deltas:
                async for delta in deltas:
                    if delta.num_tokens:
                        timeline.arrivals.append((self._clock(), delta.num_tokens))
                    timeline.stats = delta.stats or timeline.stats


class WorkerDriver(AsyncStreamDriver):
    """Driver of an engine on the thread of a worker, which runs until `close`."""

    def __init__(self, llm: "LLM", sampling: Sampling) -> None:
        from foredraft.engine.worker import Worker

        super().__init__(self._open_session)
        self._llm, self._sampling, self._next_salt = llm, sampling, _make_salt_source()
        self._worker = Worker(llm)
        self._worker.start()

    def close(self) -> None:
        self._worker.stop()

    @asynccontextmanager
    async def _open_session(self) -> AsyncIterator[StreamOpener]:
        yield self._open_stream
        while self._worker.num_running or self._worker.num_waiting:  # aborted requests must not load the next mode
            await asyncio.sleep(IDLE_POLL_SECONDS)

    async def _open_stream(self, request: LoadRequest) -> AsyncGenerator[StreamDelta, None]:
        stream = await self._worker.submit([prepare_transcript(self._llm, request, self._sampling, self._next_salt())])
        try:
            async for delta in stream:
                completion = delta.completion
                if completion is not None and completion.error is not None:
                    raise ForedraftError(f"a request failed: {completion.error}")
                yield StreamDelta(len(delta.token_ids), None if completion is None else completion.stats)
        finally:
            stream.cancel()


@dataclass(frozen=True)
class OpenAIEndpoint:
    """OpenAI-compatible server. The draft length is part of the request, so the drafter observes tokens even if off."""

    url: str  # ends in /v1
    model: str
    sampling: Sampling
    max_draft_tokens: int | None  # None = the default of the server
    api_key: str | None = None
    next_salt: Callable[[], bytes] = field(default_factory=lambda: _make_salt_source())

    def create_driver(self) -> AsyncStreamDriver:
        return AsyncStreamDriver(lambda: _connect(self))

    def build_body(self, request: LoadRequest) -> dict[str, Any]:
        s = self.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "ignore_eos": s.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "cache_salt": self.next_salt().decode(),
            "speculative_metrics": True,
        }
        if s.seed is not None:
            body["seed"] = s.seed
        if self.max_draft_tokens is not None:
            body["speculative"] = {"num_speculative_tokens": self.max_draft_tokens}
        return body


@asynccontextmanager
async def _connect(server: OpenAIEndpoint) -> AsyncIterator[StreamOpener]:
    """Open the connections of one loop."""
    httpx = require_httpx()
    headers = {} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=REQUEST_TIMEOUT) as client:
        yield lambda request: _stream_completion(client, server, request)


async def _stream_completion(
    client: Any, server: OpenAIEndpoint, request: LoadRequest
) -> AsyncGenerator[StreamDelta, None]:
    url = f"{server.url.rstrip('/')}/completions"
    num_reported = 0
    async with client.stream("POST", url, json=server.build_body(request)) as response:
        if response.status_code != 200:
            detail = (await response.aread()).decode(errors="replace")[:MAX_ERROR_CHARS]
            raise ForedraftError(f"{url} answered {response.status_code}: {detail}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise ForedraftError(f"{url} failed: {chunk['error']}")
            count = (chunk.get("usage") or {}).get("completion_tokens", num_reported)
            yield StreamDelta(count - num_reported, parse_stats(chunk, count))
            num_reported = count


def parse_stats(chunk: dict[str, Any], num_tokens: int) -> Stats | None:
    """Parse the statistics of a chunk in the format of vLLM; None if the chunk has none."""
    metrics = (chunk.get("metrics") or {}).get("speculative_decoding")
    if not metrics:
        return None
    accepted, steps = metrics["num_accepted_draft_tokens"], metrics["num_spec_steps"]
    rate = metrics["draft_acceptance_rate"]
    drafted = metrics.get("num_draft_tokens", round(accepted / rate) if rate else 0)  # vLLM omits it
    # num_spec_steps excludes passes without a draft.
    return Stats(num_tokens, steps, drafted, accepted, target_passes=num_tokens - accepted)


def fetch_model_name(url: str, api_key: str | None) -> str:
    """Fetch the model name of a server.

    Raises:
        ForedraftError: no server answers, or httpx is not installed.
    """
    httpx = require_httpx()
    models_url = f"{url.rstrip('/')}/models"
    try:
        answer = httpx.get(models_url, headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ForedraftError(
            f"no server answers at {models_url} ({error}); give --url as http://host:port/v1"
        ) from None


def require_httpx() -> Any:
    """Import httpx.

    Raises:
        ForedraftError: httpx is not installed; the message has the command.
    """
    try:
        import httpx
    except ImportError:
        raise ForedraftError("a load over HTTP needs httpx; run pip install httpx") from None
    return httpx
