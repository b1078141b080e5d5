"""Who answers the requests of a load: an engine stepped in this thread, an engine's worker, a server over HTTP."""

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

from foredraft.bench.load import Job, Loop, Timeline
from foredraft.completion import Delta, Stats
from foredraft.errors import ForedraftError
from foredraft.request import RequestOptions
from foredraft.sampling import Sampling

if TYPE_CHECKING:
    from foredraft.engine.output import Transcript
    from foredraft.llm import LLM

TIMEOUT = 600.0  # seconds for one request of a server


@dataclass
class InProcess:
    """The LLM's engine, stepped here: no thread and no queue between the clock and the step."""

    llm: "LLM"
    sampling: Sampling
    clock: Callable[[], float] = time.perf_counter
    salts: Callable[[], bytes] = field(default_factory=lambda: _salts())

    def run(self, jobs: Sequence[Job], concurrency: int) -> Loop:
        engine = self.llm.engine
        queue, active, timelines = deque(jobs), list[tuple["Transcript", Timeline]](), list[Timeline]()
        began = self.clock()
        while True:
            while queue and len(active) < concurrency:
                timelines.append(Timeline(self.clock()))
                transcript = prepared(self.llm, queue.popleft(), self.sampling, self.salts())
                engine.add(transcript)
                active.append((transcript, timelines[-1]))
            if len(active) < concurrency:
                break
            engine.step()
            now = self.clock()
            for transcript, timeline in active:
                while transcript.deltas:
                    take(transcript.deltas.popleft(), timeline, now)
            active = [pair for pair in active if not pair[0].is_finished]
        seconds = self.clock() - began
        for transcript, timeline in active:
            timeline.stats = transcript.stats()
            engine.abort(transcript.request)
        return Loop(seconds, tuple(timelines))

    def close(self) -> None:
        """Nothing is held."""


def prepared(llm: "LLM", job: Job, sampling: Sampling, salt: bytes) -> "Transcript":
    """A request whose prompt no earlier round can have left in a prefix cache."""
    options = RequestOptions(salt=salt)
    (transcript,) = llm.prepare(list(job.prompt), replace(sampling, max_tokens=job.max_tokens), options)
    return transcript


def take(delta: Delta, timeline: Timeline, now: float) -> None:
    """Note a delta. Raises ForedraftError if it says that the request failed."""
    if delta.token_ids:
        timeline.arrivals.append((now, len(delta.token_ids)))
    if delta.completion is not None:
        if delta.completion.error is not None:
            raise ForedraftError(f"a request failed: {delta.completion.error}")
        timeline.stats = delta.completion.stats


def _salts() -> Callable[[], bytes]:
    """One salt after another; those of two drivers at one server differ."""
    numbers, own = itertools.count(), secrets.token_hex(4)
    return lambda: f"load-{own}-{next(numbers)}".encode()


@dataclass(frozen=True)
class Arrival:
    """What one delta of a stream brought."""

    tokens: int
    stats: Stats | None = None  # with the last, where the other side gives them


Opener = Callable[[Job], AsyncGenerator[Arrival, None]]  # leaving the iterator early aborts the request


class Streams:
    """A closed loop of asynchronous streams; `session` makes what opens them, for one loop."""

    def __init__(
        self,
        session: Callable[[], AbstractAsyncContextManager[Opener]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session = session
        self._clock = clock

    def run(self, jobs: Sequence[Job], concurrency: int) -> Loop:
        return asyncio.run(self._loop(jobs, concurrency))

    def close(self) -> None:
        """Every loop closes its own session."""

    async def _loop(self, jobs: Sequence[Job], concurrency: int) -> Loop:
        queue, timelines = deque(jobs), list[Timeline]()
        async with self._session() as opener:
            began = self._clock()
            streams = [asyncio.ensure_future(self._stream(opener, queue, timelines)) for _ in range(concurrency)]
            try:
                await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
                seconds = self._clock() - began
            finally:
                for stream in streams:
                    stream.cancel()
                outcomes = await asyncio.gather(*streams, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Exception):  # CancelledError is none
                    raise outcome
        ended = began + seconds
        for timeline in timelines:  # what came while the others were being stopped
            timeline.arrivals = [arrival for arrival in timeline.arrivals if arrival[0] <= ended]
        return Loop(seconds, tuple(timelines))

    async def _stream(self, opener: Opener, queue: deque[Job], timelines: list[Timeline]) -> None:
        while queue:
            timeline = Timeline(self._clock())
            timelines.append(timeline)
            async with aclosing(opener(queue.popleft())) as arrivals:
                async for arrival in arrivals:
                    if arrival.tokens:
                        timeline.arrivals.append((self._clock(), arrival.tokens))
                    timeline.stats = arrival.stats or timeline.stats


class Threaded(Streams):
    """The LLM's engine on its worker's thread, which lives until `close`."""

    def __init__(self, llm: "LLM", sampling: Sampling) -> None:
        from foredraft.engine.worker import Worker

        super().__init__(self._session_of_loop)
        self._llm, self._sampling, self._salts = llm, sampling, _salts()
        self._worker = Worker(llm)
        self._worker.start()

    def close(self) -> None:
        self._worker.stop()

    @asynccontextmanager
    async def _session_of_loop(self) -> AsyncIterator[Opener]:
        yield self._open
        while self._worker.num_running or self._worker.num_waiting:  # what was aborted is no load of the next mode
            await asyncio.sleep(0.001)

    async def _open(self, job: Job) -> AsyncGenerator[Arrival, None]:
        stream = await self._worker.submit([prepared(self._llm, job, self._sampling, self._salts())])
        try:
            async for delta in stream:
                done = delta.completion
                if done is not None and done.error is not None:
                    raise ForedraftError(f"a request failed: {done.error}")
                yield Arrival(len(delta.token_ids), None if done is None else done.stats)
        finally:
            stream.cancel()


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server. Drafting is chosen by the request, so `off` keeps its drafter's memory warm."""

    url: str  # up to /v1
    model: str
    sampling: Sampling
    num_drafts: int | None  # None = the server's choice
    api_key: str | None = None
    salts: Callable[[], bytes] = field(default_factory=lambda: _salts())

    def driver(self) -> Streams:
        return Streams(lambda: _connected(self))

    def body(self, job: Job) -> dict[str, Any]:
        s = self.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(job.prompt),
            "max_tokens": job.max_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "ignore_eos": s.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "cache_salt": self.salts().decode(),
            "speculative_metrics": True,
        }
        if s.seed is not None:
            body["seed"] = s.seed
        if self.num_drafts is not None:
            body["speculative"] = {"num_speculative_tokens": self.num_drafts}
        return body


@asynccontextmanager
async def _connected(server: Server) -> AsyncIterator[Opener]:
    """The connections of one loop."""
    httpx = require_httpx()
    headers = {} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=TIMEOUT) as client:
        yield lambda job: _answered(client, server, job)


async def _answered(client: Any, server: Server, job: Job) -> AsyncGenerator[Arrival, None]:
    url = f"{server.url.rstrip('/')}/completions"
    told = 0
    async with client.stream("POST", url, json=server.body(job)) as response:
        if response.status_code != 200:
            said = (await response.aread()).decode(errors="replace")[:300]
            raise ForedraftError(f"{url} answered {response.status_code}: {said}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise ForedraftError(f"{url} failed: {chunk['error']}")
            count = (chunk.get("usage") or {}).get("completion_tokens", told)
            yield Arrival(count - told, stats_of(chunk, count))
            told = count


def stats_of(chunk: dict[str, Any], num_tokens: int) -> Stats | None:
    """The figures of a text in the words of vLLM's responses; None where a chunk has none."""
    said = (chunk.get("metrics") or {}).get("speculative_decoding")
    if not said:
        return None
    accepted, steps = said["num_accepted_draft_tokens"], said["num_spec_steps"]
    rate = said["draft_acceptance_rate"]
    drafted = said.get("num_draft_tokens", round(accepted / rate) if rate else 0)  # ours says so itself
    # passes without a draft are not among its steps
    return Stats(num_tokens, steps, drafted, accepted, target_passes=num_tokens - accepted)


def served_model(url: str, api_key: str | None) -> str:
    """What a server calls its model. Raises ForedraftError where none answers."""
    httpx = require_httpx()
    where = f"{url.rstrip('/')}/models"
    try:
        answer = httpx.get(where, headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ForedraftError(f"no server answers at {where} ({error}); give --url as http://host:port/v1") from None


def require_httpx() -> Any:
    """Raises ForedraftError with the command that installs it."""
    try:
        import httpx
    except ImportError:
        raise ForedraftError("a load over HTTP needs httpx; run pip install httpx") from None
    return httpx
