"""One HTTP connection: bounded in time and in number, and answered if its client closes the sending side early."""

import asyncio
from asyncio import TimerHandle, Transport
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from foredraft.server.room import Room
from foredraft.server.settings import Limits

READ = 16 << 10  # bytes of one connection at a time: as chunks of one byte, more of them would hold up all others
HALF_CLOSED = "foredraft.half_closed"  # in scope["state"]: an Event, set once the client sends no more
FIRST_PROBE, LAST_PROBE = 0.01, 1.0  # seconds between two looks at whether such a client still reads


class Connection(H11Protocol):
    """Closed if the headers of a request take too long to come; uvicorn itself would wait for ever.

    A server makes a subclass of its own with its own `seconds` and `room`.
    """

    seconds = Limits.header_seconds
    room: Room
    _timer: TimerHandle | None = None
    _probing: TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = self.room.log
        self._half_closed = asyncio.Event()
        self.app_state = {**app_state, HALF_CLOSED: self._half_closed}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(Transport, transport))
        if hasattr(transport, "max_size"):  # asyncio's own sockets
            transport.max_size = READ
        self._wait()
        self.room.admit(self.transport, len(self.connections))

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is None or (self.cycle is before and self.cycle.response_complete):
            self._wait()
        else:
            self._stop_waiting()

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection: the request is whole and its answer is still to come. A client that closed its
        sending side alone reads that answer; one that closed everything looks the same until something is sent."""
        if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            return False
        self._half_closed.set()
        self._probing = self.loop.call_later(FIRST_PROBE, self._probe, FIRST_PROBE)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._probing is not None:
            self._probing.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed.is_set() and self.cycle.response_complete:
            self.transport.close()
        elif self.cycle.response_complete:
            self.room.idle[self.transport] = None

    def _unsupported_upgrade_warning(self) -> None:
        """Not the inherited one: it tells the log, at every such request, to install what we do not use."""

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        self.room.idle.pop(self.transport, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self, seconds: float) -> None:
        """Send an interim response, which every client of HTTP/1.1 has to skip: to one that has left, the second fails
        and ends the connection. A stream probes by itself, with its comments; HTTP/1.0 has no interim responses."""
        if self.transport.is_closing() or self.cycle.response_started or self.scope["http_version"] == "1.0":
            return
        self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue")))
        self._probing = self.loop.call_later(seconds, self._probe, min(2 * seconds, LAST_PROBE))
