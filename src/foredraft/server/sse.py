"""Server-sent events by hand: comments while nothing comes, an end when the reader left or does not read."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.server.connection import FIRST_PROBE, HALF_CLOSED

Value = TypeVar("Value")
DONE = b"data: [DONE]\n\n"
PING = b": still here\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects would undo the streaming
]


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def until_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Value]) -> Value | None:
    """What `work` returns; it is cancelled, and None comes back, if the client leaves first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _end(task)
        await _end(gone)


class EventStream(Response):
    """Writes events as they come, one at a time: the next is not asked for before the last has gone to the socket, so
    that a slow reader holds back its source and nothing piles up here."""

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], keep_alive: float, stall_seconds: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = list(_HEADERS)
        self._events, self._close = events, close
        self._keep_alive, self._stall = keep_alive, stall_seconds
        self._written = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._write(send, scope.get("state", {}).get(HALF_CLOSED)))
        finally:
            self._close()

    async def _write(self, send: Send, half_closed: asyncio.Event | None) -> None:
        pinger = asyncio.ensure_future(self._ping(send, half_closed or asyncio.Event()))
        try:
            async for data in self._events:
                await self._put(send, data)
            await _end(pinger)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            return  # nobody reads: the connection ends without the last event
        finally:
            await _end(pinger)

    async def _put(self, send: Send, data: bytes) -> None:
        async with asyncio.timeout(self._stall):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        self._written = time.monotonic()

    async def _ping(self, send: Send, half_closed: asyncio.Event) -> None:
        """A comment after every `keep_alive` seconds of silence; at once and more often if the client sends no more,
        for only a write that fails tells whether it has left."""
        self._written = time.monotonic()
        while not await _happens(half_closed, max(0.01, self._written + self._keep_alive - time.monotonic())):
            if time.monotonic() - self._written >= self._keep_alive:
                await self._put(send, PING)
        seconds = FIRST_PROBE
        while True:
            await self._put(send, PING)
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, self._keep_alive)


async def _happens(event: asyncio.Event, seconds: float) -> bool:
    """Whether it is set within this time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancelled and gone; what it raised belongs to whoever asked for its result."""
    if not task.done():
        task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
