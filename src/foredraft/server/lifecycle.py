"""Server process: listen, load the model, serve, drain on a signal, exit with code 0.

The server listens before its model is loaded.

first SIGTERM or SIGINT   /ready turns to 503; requests may finish for drain_timeout seconds, then they are aborted
second signal             all requests are aborted at once
"""

import asyncio
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from foredraft.errors import ForedraftError
from foredraft.server.app import create_app
from foredraft.server.connection import Connection
from foredraft.server.connection_limit import LISTEN_BACKLOG, ConnectionLimit
from foredraft.server.log_throttle import make_throttled_logger
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings

if TYPE_CHECKING:
    from foredraft.llm import LLM

log = logging.getLogger(__name__)
FLUSH_SECONDS = 5  # seconds for the last bytes of aborted responses
HEADER_SLACK_BYTES = 16 << 10  # bytes of headers read beyond the limit, so that HttpCheckMiddleware can answer 431


class HttpServer(uvicorn.Server):
    """uvicorn server with this project's connections and limits.

    Args:
        app: ASGI application.
        settings: of the server.
        header_timeout: seconds until the headers must have arrived. Default None = that of the settings.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, header_timeout: float | None = None) -> None:
        limits = settings.limits
        self.connection_limit = ConnectionLimit.from_process_limits(make_throttled_logger(__name__))
        attributes = {
            "header_timeout": header_timeout or limits.header_timeout,
            "connection_limit": self.connection_limit,
        }
        protocol = type("Connection", (Connection,), attributes)
        config = uvicorn.Config(
            app,
            http=protocol,
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=self.connection_limit.accepts_per_turn,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            h11_max_incomplete_event_size=limits.max_header_bytes + limits.max_target_bytes + HEADER_SLACK_BYTES,
        )
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._handle_loop_error)
        await super().startup(sockets)
        for sock in sockets or []:
            # asyncio sets the kernel's queue to the accepts per turn, which is too short for a burst.
            sock.listen(LISTEN_BACKLOG)

    def _handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the event loop. asyncio repeats a failed accept, so that its warning is throttled."""
        if context["message"] == "socket.accept() out of system resource":
            self.connection_limit.log.warning("connections cannot be accepted: %s", context["exception"])
        else:
            loop.default_exception_handler(context)


class ModelServer(HttpServer):
    """Server of one service. It runs until a signal, or until loading the model fails."""

    def __init__(self, service: Service, header_timeout: float | None = None) -> None:
        super().__init__(create_app(service), service.settings, header_timeout)
        self.service = service
        self.load_error: Exception | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._load_thread: threading.Thread | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, abort at the second. uvicorn's handler would end the process by the signal."""
        is_again, self.service.is_stopping = self.service.is_stopping, True
        if self._loop is None or not self.service.is_open:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._abort_and_exit if is_again else self._start_drain)

    def load(self, loader: "Callable[[], LLM]", on_ready: Callable[[], None]) -> None:
        """Load the model on a daemon thread, so that the server can stop while it loads.

        Args:
            loader: returns the LLM. Its exception stops the server and is stored in `load_error`.
            on_ready: called after the service has started.
        """
        self._load_thread = threading.Thread(
            target=self._load_model, args=(loader, on_ready), name="foredraft-load", daemon=True
        )
        self._load_thread.start()

    @property
    def is_loading(self) -> bool:
        return self._load_thread is not None and self._load_thread.is_alive()

    def _load_model(self, loader: "Callable[[], LLM]", on_ready: Callable[[], None]) -> None:
        try:
            self.service.open(loader())
            gc.freeze()  # later collections skip the objects of torch; large request bodies start many collections
            on_ready()
        except Exception as error:  # `serve` raises it again
            self.load_error = error
            self.should_exit = True

    def _start_drain(self) -> None:
        self._drain_task = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        seconds = self.service.settings.drain_timeout
        if not await self.service.worker.drain(seconds):
            log.warning("requests that still ran after %g seconds are aborted", seconds)
            self.service.worker.abort_all()
        self.should_exit = True

    def _abort_and_exit(self) -> None:
        self.service.worker.abort_all()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ForedraftError if the address is invalid or in use."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError:
        raise ForedraftError(f"--host {host!r} is not an address of this machine") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)  # fails here if the port is in use: with SO_REUSEADDR, `bind` may succeed
    except OSError as error:
        sock.close()
        reason = (error.strerror or str(error)).lower()
        raise ForedraftError(f"cannot listen on {host} port {port}: {reason}; give another --port or --host") from None
    return sock


def serve(service: Service, sock: socket.socket, loader: "Callable[[], LLM]", on_ready: Callable[[], Any]) -> None:
    """Serve until a signal. Raises the exception of the loader, if any.

    Args:
        service: state of all routes, which gets the loaded LLM.
        sock: listening socket.
        loader: returns the LLM; called on another thread.
        on_ready: called after the model is loaded.
    """
    server = ModelServer(service)
    server.load(loader, on_ready)
    server.run(sockets=[sock])
    if server.is_loading:  # the thread may be in native code, which crashes during an ordinary interpreter exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if server.load_error is not None:
        raise server.load_error
