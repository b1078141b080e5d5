"""Front of several replicas: the ASGI application that clients connect to.

It answers /health, /ready and /metrics for all replicas, and sends every other request to one of them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Message, Receive, Scope, Send

from foredraft.replicas.affinity import read_affinity_key
from foredraft.replicas.directory import Listing, ReplicaCard
from foredraft.replicas.frames import RequestHead
from foredraft.replicas.front_metrics import FrontMetrics, join_pages
from foredraft.replicas.pool import ReplicaPool
from foredraft.replicas.relay import (
    AbortedResponseError,
    BrokenReplicaError,
    HeldResponse,
    Relay,
    UnreachableReplicaError,
)
from foredraft.server.access_log import AccessLog
from foredraft.server.errors import ApiError, make_unavailable_error, on_api_error, on_crash, on_http_error
from foredraft.server.http_checks import HttpCheckMiddleware
from foredraft.server.settings import ServerSettings
from foredraft.server.sse import run_until_disconnect

log = logging.getLogger(__name__)
WATCH_RETRY_SECONDS = 1.0  # seconds after a failed look into the directory
STATE_SECONDS = 5.0  # seconds that a replica has to answer /health, /ready or /metrics
BROKEN_MESSAGE = "the replica that ran this request has stopped; send the request again"
STOPPING_MESSAGE = "the server is shutting down"
Watch = Callable[[int], Awaitable[Listing]]


class Front:
    """State of the front.

    Args:
        settings: of the server; the replicas have the same.
        secret: value that the replicas demand.
        watch: waits until the directory has another version than the given one, and returns its listing.
    """

    def __init__(self, settings: ServerSettings, secret: str, watch: Watch) -> None:
        self.settings, self._secret, self._watch = settings, secret, watch
        self.metrics = FrontMetrics()
        self.pool = ReplicaPool(self.metrics)
        self.is_stopping = self._is_aborting = False
        self._exchanges: set[asyncio.Task[None]] = set()

    async def follow_directory(self) -> None:
        """Keep the pool equal to the directory, until cancelled."""
        version = 0
        while True:
            try:
                listing = await self._watch(version)
                version = listing.version
                self.pool.update(listing)
            except Exception as error:  # the directory is restarted; the known replicas still run
                log.warning("the directory of replicas does not answer: %s", error)
                await asyncio.sleep(WATCH_RETRY_SECONDS)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a request to a replica (ASGI)."""
        if self.is_stopping:
            raise make_unavailable_error(STOPPING_MESSAGE)
        body = (await receive()).get("body", b"")  # HttpCheckMiddleware has read it as a whole
        task = asyncio.ensure_future(run_until_disconnect(receive, self._relay(scope, body, send)))
        self._exchanges.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._exchanges.discard(task)
            task.cancel()
        if not task.cancelled():
            task.result()

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the running ones. Returns whether all have ended in time."""
        self.is_stopping = True
        if self._exchanges:
            await asyncio.wait(self._exchanges, timeout=seconds)
        return not self._exchanges

    def abort_all(self) -> None:
        """End all running requests."""
        self.is_stopping = self._is_aborting = True
        for task in self._exchanges:
            task.cancel()

    async def _relay(self, scope: Scope, body: bytes, send: Send) -> None:
        key = read_affinity_key(scope["headers"], body, scope["path"])
        head = RequestHead.from_scope(scope, self._secret)
        refused: dict[str, HeldResponse | None] = {}
        while (card := self.pool.choose(key, refused)) is not None:
            relay = Relay(card, head, body)
            try:
                with self.pool.count(card):
                    response = await relay.run(send)
            except UnreachableReplicaError:
                self._lose(card)
                refused[card.id] = None
                continue
            except BrokenReplicaError:
                self._lose(card)
                self.metrics.broken[card.id] += 1
                await relay.end(BROKEN_MESSAGE, scope, send)
                return
            except asyncio.CancelledError:
                if self._is_aborting:
                    await relay.end(STOPPING_MESSAGE, scope, send)
                raise
            except AbortedResponseError:
                if not relay.has_started:
                    raise ApiError(500, "internal error; the server's log says more") from None
                return  # the client's connection is closed, as the end is missing
            if response is not None and response.is_busy:
                refused[card.id] = response
                continue
            self.metrics.rerouted.update(refused.keys())
            if response is not None:
                await response.send(send)
            return
        await self._refuse(list(refused.values()), send)

    def _lose(self, card: ReplicaCard) -> None:
        log.warning("replica %s does not answer any more", card.id)
        self.pool.drop(card)

    async def _refuse(self, responses: "list[HeldResponse | None]", send: Send) -> None:
        """Pass on the refusal of the last replica; without one, no replica runs."""
        answers = [response for response in responses if response is not None]
        if not answers:
            raise make_unavailable_error("no replica runs at the moment; send the request again later")
        await answers[-1].send(send)

    async def ask_all(self, scope: Scope, path: str) -> "dict[str, Answer | None]":
        """Send a GET request to every replica; None for one that does not answer in time."""
        cards = list(self.pool.cards.values())
        answers = await asyncio.gather(*(self._ask(card, scope, path) for card in cards))
        return {card.id: answer for card, answer in zip(cards, answers, strict=True)}

    async def _ask(self, card: ReplicaCard, scope: Scope, path: str) -> "Answer | None":
        head = replace(RequestHead.from_scope(scope, self._secret), method="GET", path=path, raw_path=path, query="")
        try:
            async with asyncio.timeout(STATE_SECONDS):
                response = await Relay(card, head, b"").run(_drop_message)
        except (UnreachableReplicaError, BrokenReplicaError):
            self._lose(card)
            return None
        except (AbortedResponseError, TimeoutError):
            return None
        return None if response is None else Answer(response.head.status, b"".join(response.body))


@dataclass(frozen=True)
class Answer:
    """Response of a replica to a request of the front."""

    status: int
    body: bytes


async def _drop_message(message: Message) -> None:
    """Ignore a part of an event stream: no state of a replica is one."""


def create_front_app(front: Front) -> Starlette:
    """Build the application of a front."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        task = asyncio.ensure_future(front.follow_directory())
        yield
        task.cancel()

    async def health(request: Request) -> Response:
        """Return 200 while the replicas start, and then if one of them is healthy."""
        return await _answer_state(front, request, "ok" if front.pool.has_started.is_set() else "starting")

    async def ready(request: Request) -> Response:
        """Return 200 if a replica takes requests."""
        return await _answer_state(front, request, "ready")

    async def metrics(request: Request) -> Response:
        """Return the metrics of all replicas with a label `replica`, and those of the front."""
        answers = await front.ask_all(request.scope, "/metrics")
        pages = {name: answer.body.decode() for name, answer in answers.items() if answer and answer.status == 200}
        loads = {name: front.pool.loads.get(name, 0) for name in front.pool.cards}
        return Response(front.metrics.render(loads) + join_pages(pages), media_type=CONTENT_TYPE_LATEST)

    middleware = [Middleware(HttpCheckMiddleware, settings=front.settings)]
    if front.settings.has_access_log:
        middleware.insert(0, Middleware(AccessLog))
    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Mount("", app=front.serve),
    ]
    handlers = {ApiError: on_api_error, HTTPException: on_http_error, Exception: on_crash}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


async def _answer_state(front: Front, request: Request, status: str) -> Response:
    """Ask all replicas, and return 200 if one of them says so."""
    path = request.url.path
    answers = await front.ask_all(request.scope, path)
    states = {
        name: "no answer" if answer is None else _STATES[answer.status == 200] for name, answer in answers.items()
    }
    is_fine = "ok" in states.values() and not (front.is_stopping and path == "/ready")
    if is_fine or status == "starting":
        return JSONResponse({"status": status, "replicas": states})
    return JSONResponse({"status": "no replica is available", "replicas": states}, 503, {"Retry-After": "5"})


_STATES = {True: "ok", False: "unavailable"}
