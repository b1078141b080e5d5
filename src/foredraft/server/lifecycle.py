"""A server as a process: listens at once, loads meanwhile, drains when told to stop, and leaves with code 0.

SIGTERM, SIGINT   not ready any more; what runs goes on for drain_timeout seconds, then it is aborted
once more         what runs is aborted now
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

from foredraft.errors import ForedraftError
from foredraft.server.app import create_app
from foredraft.server.connection import Connection
from foredraft.server.room import QUEUE, Room
from foredraft.server.service import Service
from foredraft.server.sparing import sparing_logger

if TYPE_CHECKING:
    from foredraft.llm import LLM

log = logging.getLogger(__name__)
LAST_SECONDS = 5  # for the last bytes of aborted answers to leave
SLACK = 16 << 10  # of headers beyond the limit, so that the answer to too many can say so


class Server(uvicorn.Server):
    """Serves one service until a signal, or until loading its model fails."""

    def __init__(self, service: Service, header_seconds: float | None = None) -> None:
        limits = service.settings.limits
        self.room = Room.of_process(sparing_logger(__name__))
        its = {"seconds": header_seconds or limits.header_seconds, "room": self.room}
        protocol = type("Connection", (Connection,), its)
        config = uvicorn.Config(
            create_app(service),
            http=protocol,
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=self.room.accepted,
            timeout_graceful_shutdown=LAST_SECONDS,
            h11_max_incomplete_event_size=limits.headers + limits.target + SLACK,
        )
        super().__init__(config)
        self.service = service
        self.failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._loading: threading.Thread | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._note)
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(QUEUE)  # asyncio made it as short as what it takes in one turn

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not the inherited one: that ends the process by the signal, and we leave with a code."""
        is_again, self.service.is_stopping = self.service.is_stopping, True
        if self._loop is None or not self.service.is_open:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._abort if is_again else self._drain)

    def load(self, loader: "Callable[[], LLM]", on_ready: Callable[[], None]) -> None:
        """Load the model on a thread of its own, which nobody waits for when the server stops first."""
        self._loading = threading.Thread(target=self._load, args=(loader, on_ready), name="foredraft-load", daemon=True)
        self._loading.start()

    @property
    def is_loading(self) -> bool:
        return self._loading is not None and self._loading.is_alive()

    def _load(self, loader: "Callable[[], LLM]", on_ready: Callable[[], None]) -> None:
        try:
            self.service.open(loader())
            gc.freeze()  # the collector, started by a body of many lists, need not walk through torch every time
            on_ready()
        except Exception as error:  # shown by whoever started us
            self.failure = error
            self.should_exit = True

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What went wrong in the loop. asyncio tries again and again to accept what there is no file for."""
        if context["message"] == "socket.accept() out of system resource":
            self.room.log.warning("connections cannot be accepted: %s", context["exception"])
        else:
            loop.default_exception_handler(context)

    def _drain(self) -> None:
        self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        seconds = self.service.settings.drain_timeout
        if not await self.service.worker.drain(seconds):
            log.warning("requests that still ran after %g seconds are aborted", seconds)
            self.service.worker.abort_all()
        self.should_exit = True

    def _abort(self) -> None:
        self.service.worker.abort_all()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ForedraftError where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError:
        raise ForedraftError(f"--host {host!r} is no address of this machine") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(QUEUE)  # two sockets may be bound to one port, but only one of them can listen
    except OSError as error:
        sock.close()
        reason = (error.strerror or str(error)).lower()
        raise ForedraftError(f"cannot listen on {host} port {port}: {reason}; give another --port or --host") from None
    return sock


def serve(service: Service, sock: socket.socket, loader: "Callable[[], LLM]", on_ready: Callable[[], Any]) -> None:
    """Until a signal. Raises what the loader raised."""
    server = Server(service)
    server.load(loader, on_ready)
    server.run(sockets=[sock])
    if server.is_loading:  # inside native code, which an ordinary end would pull the ground from under
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if server.failure is not None:
        raise server.failure
