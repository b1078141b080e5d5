"""Replica: the server's application behind a socket that only the front connects to."""

import asyncio
import hmac
import logging
import socket
import threading
from collections.abc import Coroutine
from typing import Any

from starlette.types import ASGIApp, Message

from foredraft.replicas.affinity import make_replica_tag
from foredraft.replicas.frames import Frame, FrameError, FrameKind, FrameSplitter, HttpResponseHead, RequestHead
from foredraft.server.app import create_app
from foredraft.server.served_models import ServedModels
from foredraft.server.service import Service

log = logging.getLogger(__name__)
READ_BYTES = 64 << 10  # bytes read at once
REQUEST_SECONDS = 30.0  # seconds until a request must have arrived
FLUSH_SECONDS = 5.0  # seconds for the last bytes of aborted responses
BACKLOG = 1024  # connections that may wait to be accepted


class ReplicaServer:
    """Server of one replica, on a thread and an event loop of its own.

    Args:
        service: with a loaded model; closed by `stop`.
        host: address to listen on; the port is any free one.
        secret: value that each request must carry.
    """

    def __init__(self, service: Service, host: str, secret: str) -> None:
        self._service, self._secret = service, secret
        self._socket = socket.create_server((host, 0), backlog=BACKLOG)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        tag = make_replica_tag(self.host, self.port)
        self._app: ASGIApp = create_app(ServedModels.single(service), tag=tag)
        self._listener: asyncio.Server | None = None
        self._exchanges: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="foredraft-replica", daemon=True)

    def start(self) -> None:
        """Accept requests."""
        self._thread.start()
        self._run(self._listen())

    def stop(self) -> None:
        """Refuse new requests, let the running ones end within the drain time of the settings, and stop the model."""
        if self._thread.is_alive():
            self._run(self._drain())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._service.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accept, sock=self._socket, backlog=BACKLOG)

    async def _drain(self) -> None:
        self._service.is_stopping = True
        seconds = self._service.settings.drain_timeout
        if not await self._service.worker.drain(seconds):
            log.warning("requests that still ran after %g seconds are aborted", seconds)
            self._service.worker.abort_all()
        if self._exchanges:
            await asyncio.wait(self._exchanges, timeout=FLUSH_SECONDS)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._exchanges.add(task)
        try:
            await self._answer(reader, writer)
        except (FrameError, TimeoutError, OSError) as error:
            log.debug("a connection ended: %s", error)
        except Exception:  # the application has answered with status 500 already
            log.exception("a request failed")
        finally:
            self._exchanges.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(REQUEST_SECONDS):
            head, body = await _read_request(reader)
        if not hmac.compare_digest(head.secret.encode(), self._secret.encode()):
            log.warning("a connection without the secret of the front was refused")
            return
        exchange = _AsgiChannels(reader, writer, body)
        try:
            await self._app(head.build_scope({}), exchange.receive, exchange.send)
        finally:
            if not exchange.is_complete and not writer.is_closing():
                writer.write(Frame(FrameKind.ABORT).encode())


async def _read_request(reader: asyncio.StreamReader) -> tuple[RequestHead, bytes]:
    splitter, head = FrameSplitter(), None
    while data := await reader.read(READ_BYTES):
        for frame in splitter.feed(data):
            if frame.kind is FrameKind.HEAD:
                head = RequestHead.decode(frame.payload)
            elif frame.kind is FrameKind.BODY and head is not None:
                return head, frame.payload
            else:
                raise FrameError(f"a request has no frame {frame.kind.name}")
    raise FrameError("the connection ended before the request")


class _AsgiChannels:
    """ASGI channels of one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> None:
        self._reader, self._writer = reader, writer
        self._body: bytes | None = body
        self.is_complete = False

    async def receive(self) -> Message:
        """Return the body, then wait until the front closes the connection."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        try:
            while await self._reader.read(READ_BYTES):
                pass
        except OSError:
            pass
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Write a message of the response; wait while the front does not read."""
        if message["type"] == "http.response.start":
            head = HttpResponseHead(message["status"], list(message.get("headers", ())))
            self._writer.write(Frame(FrameKind.HEAD, head.encode()).encode())
            return
        data = Frame(FrameKind.BODY, message["body"]).encode() if message.get("body") else b""
        if not message.get("more_body", False):
            data += Frame(FrameKind.END).encode()
            self.is_complete = True
        self._writer.write(data)
        await self._writer.drain()
