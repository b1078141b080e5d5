"""Server-sent events: keep-alive comments, back-pressure, and an end if the client leaves or does not read."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.server.connection import FIRST_PROBE_SECONDS, HALF_CLOSED_KEY

Value = TypeVar("Value")
DONE_EVENT = b"data: [DONE]\n\n"
PING_COMMENT = b": still here\n\n"
MIN_WAIT_SECONDS = 0.01  # seconds of the shortest wait for the next comment
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # disables buffering in nginx
]


def encode_event(data: dict[str, Any], kind: str | None = None) -> bytes:
    """Encode one event with JSON data.

    Args:
        data: object of the event.
        kind: name of the event. Default None = it has none.
    """
    name = b"" if kind is None else f"event: {kind}\n".encode()
    return name + b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, Value]) -> Value | None:
    """Run a coroutine and return its result. If the client disconnects first, cancel it and return None."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel_task(task)
        await _cancel_task(disconnect)


class EventStream(Response):
    """Streaming response that writes one event at a time.

    The next event is read only after the last one was written to the socket, so that a slow client slows its source
    and no events accumulate here.

    Args:
        events: encoded events.
        close: called at the end, also if the client has left.
        keep_alive_seconds: seconds without an event, after which a comment is sent.
        stall_timeout: seconds that one write may take before the stream ends.
        headers: further headers. Default none.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        keep_alive_seconds: float,
        stall_timeout: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in headers.items())]
        self._events, self._close = events, close
        self._keep_alive_seconds, self._stall_timeout = keep_alive_seconds, stall_timeout
        self._last_write = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await run_until_disconnect(receive, self._write_events(send, scope.get("state", {}).get(HALF_CLOSED_KEY)))
        finally:
            self._close()

    async def _write_events(self, send: Send, half_closed: asyncio.Event | None) -> None:
        pinger = asyncio.ensure_future(self._send_pings(send, half_closed or asyncio.Event()))
        try:
            async for data in self._events:
                await self._send_bytes(send, data)
            await _cancel_task(pinger)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            return  # the client does not read: the connection ends without the last event
        finally:
            await _cancel_task(pinger)

    async def _send_bytes(self, send: Send, data: bytes) -> None:
        async with asyncio.timeout(self._stall_timeout):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        self._last_write = time.monotonic()

    async def _send_pings(self, send: Send, half_closed: asyncio.Event) -> None:
        """Send a comment after every `keep_alive_seconds` without an event.

        If the client is half-closed, send comments at once and more often: only a failed write shows that it has left.
        """
        self._last_write = time.monotonic()
        while not await _wait_for_event(
            half_closed, max(MIN_WAIT_SECONDS, self._last_write + self._keep_alive_seconds - time.monotonic())
        ):
            if time.monotonic() - self._last_write >= self._keep_alive_seconds:
                await self._send_bytes(send, PING_COMMENT)
        seconds = FIRST_PROBE_SECONDS
        while True:
            await self._send_bytes(send, PING_COMMENT)
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, self._keep_alive_seconds)


async def _wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event. Returns True if it was set within the time."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


async def _cancel_task(task: "asyncio.Future[Any]") -> None:
    """Cancel a task and wait for its end. Its exception is ignored here: `task.result` raises it."""
    if not task.done():
        task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
