"""Server process: listen, load the models, serve, drain on a signal, exit with code 0.

The server listens before its models are loaded.

first SIGTERM or SIGINT   /ready turns to 503; requests may finish for drain_timeout seconds, then they are aborted
second signal             all requests are aborted at once
"""

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from foredraft.errors import ForedraftError
from foredraft.server.admin import AdminRoutes
from foredraft.server.app import create_app
from foredraft.server.connection import Connection
from foredraft.server.connection_limit import LISTEN_BACKLOG, ConnectionLimit
from foredraft.server.log_throttle import make_throttled_logger
from foredraft.server.served_models import ServedModels
from foredraft.server.settings import ServerSettings

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
    """Server of models. It runs until a signal, or until loading its first models fails.

    Args:
        models: models of the server.
        admin: routes that load and unload models. Default None = there are none.
        header_timeout: seconds until the headers must have arrived. Default None = that of the settings.
    """

    def __init__(
        self, models: ServedModels, admin: AdminRoutes | None = None, header_timeout: float | None = None
    ) -> None:
        super().__init__(create_app(models, admin), models.settings, header_timeout)
        self.models = models
        self.load_error: Exception | None = None
        self._drain_task: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, abort at the second. uvicorn's handler would end the process by the signal."""
        is_again = self.models.stop()
        if self._loop is None or not self.models.open_services:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._abort_and_exit if is_again else self._start_drain)

    def load(self, load: Callable[[], None], on_ready: Callable[[], None]) -> None:
        """Load the models on a daemon thread, so that the server can stop while it loads.

        Args:
            load: opens all services. Its exception stops the server and is stored in `load_error`.
            on_ready: called after that.
        """
        self.models.start_load(partial(self._load_models, load, on_ready))

    def _load_models(self, load: Callable[[], None], on_ready: Callable[[], None]) -> None:
        try:
            load()
            gc.freeze()  # later collections skip the objects of torch; large request bodies start many collections
            on_ready()
        except Exception as error:  # `serve` raises it again
            self.load_error = error
            self.should_exit = True

    def _start_drain(self) -> None:
        self._drain_task = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        seconds = self.models.settings.drain_timeout
        if not await self.models.drain(seconds):
            log.warning("requests that still ran after %g seconds are aborted", seconds)
            self.models.abort_all()
        self.should_exit = True

    def _abort_and_exit(self) -> None:
        self.models.abort_all()
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


def serve(
    models: ServedModels,
    sock: socket.socket,
    load: Callable[[], None],
    on_ready: Callable[[], Any],
    admin: AdminRoutes | None = None,
) -> None:
    """Serve until a signal. Raises the exception of `load`, if any.

    Args:
        models: models of the server.
        sock: listening socket.
        load: opens the services of all models; called on another thread.
        on_ready: called after the models are loaded.
        admin: routes that load and unload models. Default None = there are none.
    """
    server = ModelServer(models, admin)
    server.load(load, on_ready)
    server.run(sockets=[sock])
    if models.is_loading:  # the thread may be in native code, which crashes during an ordinary interpreter exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if server.load_error is not None:
        raise server.load_error
