"""One request on one replica: send it, and pass the response on as it arrives.

The head of a response is held until the first bytes of its body. A body that is no event stream is held as a whole.
So a replica that stops before it has sent a token costs a status 503, and no half of a response.
"""

import asyncio
from dataclasses import dataclass, field

from starlette.types import Message, Scope, Send

from foredraft.replicas.directory import ReplicaCard
from foredraft.replicas.frames import Frame, FrameError, FrameKind, FrameSplitter, HttpResponseHead, RequestHead
from foredraft.server.anthropic_api.error_format import is_anthropic_path
from foredraft.server.errors import ApiError, make_unavailable_error
from foredraft.server.responses import encode_error_event
from foredraft.server.sse import DONE_EVENT, encode_event

READ_BYTES = 64 << 10  # bytes read at once
CONNECT_SECONDS = 3.0  # seconds until a replica must have accepted
BUSY_STATUSES = frozenset({429, 503})  # the queue is full; the replica stops
RETRY_SECONDS = 1.0  # seconds until a client should send it again


class UnreachableReplicaError(Exception):
    """The replica does not accept connections; it has not seen the request."""


class BrokenReplicaError(Exception):
    """The replica stopped while it ran the request."""


class AbortedResponseError(Exception):
    """The replica ended a response before its end, and still runs."""


@dataclass
class HeldResponse:
    """Response of which the client has seen nothing."""

    head: HttpResponseHead
    body: list[bytes] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        """Whether another replica may take the request."""
        return self.head.status in BUSY_STATUSES

    async def send(self, send: Send) -> None:
        """Send all of it."""
        await send(_make_start(self.head))
        await send(_make_body(b"".join(self.body), False))


class Relay:
    """One request on one replica.

    Args:
        card: the replica.
        head: of the request.
        body: of the request.
    """

    def __init__(self, card: ReplicaCard, head: RequestHead, body: bytes) -> None:
        self._card = card
        self._request = Frame(FrameKind.HEAD, head.encode()).encode() + Frame(FrameKind.BODY, body).encode()
        self._splitter = FrameSplitter()
        self._held: HeldResponse | None = None
        self.has_started = False  # the client has seen a part of the response

    async def run(self, send: Send) -> HeldResponse | None:
        """Send the request, and pass on an event stream. Cancellation ends the request on the replica.

        Returns:
            A response that is no event stream, of which nothing was sent; else None.

        Raises:
            UnreachableReplicaError: the replica has not seen the request.
            BrokenReplicaError: the replica stopped.
            AbortedResponseError: the response has no end.
        """
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(self._card.host, self._card.port, limit=READ_BYTES)
        except (OSError, TimeoutError):
            raise UnreachableReplicaError from None
        try:
            writer.write(self._request)
            while data := await self._read(reader):
                if await self._pass_on(data, send):
                    return None if self.has_started else self._held
            raise BrokenReplicaError
        finally:
            writer.transport.abort()

    async def end(self, message: str, scope: Scope, send: Send) -> None:
        """End a response that the replica will not complete: with status 503, or with the last event of a stream."""
        error = make_unavailable_error(message, RETRY_SECONDS)
        if self.has_started:
            await send(_make_body(_encode_end(error, scope["path"]), False))
        else:
            await error.make_response(scope["path"])(scope, _receive_nothing, send)

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """Read some bytes; none if the replica has closed the connection."""
        try:
            return await reader.read(READ_BYTES)
        except OSError:
            return b""

    async def _pass_on(self, data: bytes, send: Send) -> bool:
        """Take the frames of `data`, and send the body of an event stream. Returns True at the end of the response."""
        parts, is_last, is_aborted = [], False, False
        try:
            for frame in self._splitter.feed(data):
                if frame.kind is FrameKind.HEAD:
                    self._held = HeldResponse(HttpResponseHead.decode(frame.payload))
                elif frame.kind is FrameKind.BODY:
                    parts.append(frame.payload)
                elif frame.kind is FrameKind.END:
                    is_last = True
                else:
                    is_aborted = True
        except FrameError:
            raise BrokenReplicaError from None
        if self._held is None:
            if parts or is_last:
                raise BrokenReplicaError
        elif not self._held.head.is_event_stream:
            self._held.body += parts
        elif parts or is_last:
            if not self.has_started:
                self.has_started = True
                await send(_make_start(self._held.head))
            await send(_make_body(b"".join(parts), not is_last))
        if is_aborted:
            raise AbortedResponseError
        return is_last


def _make_start(head: HttpResponseHead) -> Message:
    return {"type": "http.response.start", "status": head.status, "headers": head.headers}


def _encode_end(error: ApiError, path: str) -> bytes:
    """Encode an error as the end of a stream of the route with this path."""
    if is_anthropic_path(path):
        return encode_event(error.build_body(path), "error")
    return encode_error_event(error) + DONE_EVENT


def _make_body(data: bytes, has_more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": has_more}


async def _receive_nothing() -> Message:
    raise AssertionError("a response that is no stream reads nothing")
