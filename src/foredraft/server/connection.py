"""HTTP connection of uvicorn with a header timeout, a connection limit, and support for half-closed clients."""

import asyncio
from asyncio import TimerHandle, Transport
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from foredraft.server.connection_limit import ConnectionLimit
from foredraft.server.settings import RequestLimits

READ_BYTES = 16 << 10  # bytes read at once: parsing more one-byte chunks would delay all other connections
HALF_CLOSED_KEY = "foredraft.half_closed"  # key of scope["state"] for an Event: the client has closed its sending side
FIRST_PROBE_SECONDS = 0.01  # seconds until the first probe of a half-closed client; the interval doubles
LAST_PROBE_SECONDS = 1.0  # largest interval in seconds between two probes


class Connection(H11Protocol):
    """HTTP connection that is closed if the headers of a request arrive too late; uvicorn has no such limit.

    Each server makes a subclass that sets `header_timeout` (seconds) and `connection_limit`.
    """

    header_timeout = RequestLimits.header_timeout
    connection_limit: ConnectionLimit
    _header_timer: TimerHandle | None = None
    _probe_timer: TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = self.connection_limit.log
        self._half_closed = asyncio.Event()
        self.app_state = {**app_state, HALF_CLOSED_KEY: self._half_closed}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(Transport, transport))
        if hasattr(transport, "max_size"):  # asyncio's socket transports have this attribute
            transport.max_size = READ_BYTES
        self._start_header_timer()
        self.connection_limit.admit(self.transport, len(self.connections))

    def data_received(self, data: bytes) -> None:
        old_cycle = self.cycle
        super().data_received(data)
        if self.cycle is None or (self.cycle is old_cycle and self.cycle.response_complete):
            self._start_header_timer()
        else:
            self._stop_header_timer()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open (True) if a complete request still waits for its response.

        A client that closed only its sending side reads that response. A client that has left looks the same until
        something is sent to it, so that probes are started.
        """
        if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            return False
        self._half_closed.set()
        self._probe_timer = self.loop.call_later(FIRST_PROBE_SECONDS, self._probe_client, FIRST_PROBE_SECONDS)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed.is_set() and self.cycle.response_complete:
            self.transport.close()
        elif self.cycle.response_complete:
            self.connection_limit.idle_connections[self.transport] = None

    def _unsupported_upgrade_warning(self) -> None:
        """Suppress uvicorn's log line, which recommends packages for websockets at every such request."""

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout, self.transport.close)

    def _stop_header_timer(self) -> None:
        self.connection_limit.idle_connections.pop(self.transport, None)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _probe_client(self, seconds: float) -> None:
        """Send an interim response to a half-closed client, and schedule the next one.

        HTTP/1.1 clients ignore interim responses. If the client has left, the second write fails and the connection
        ends. HTTP/1.0 has no interim responses, and a stream probes with its own comments.
        """
        if self.transport.is_closing() or self.cycle.response_started or self.scope["http_version"] == "1.0":
            return
        self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue")))
        self._probe_timer = self.loop.call_later(seconds, self._probe_client, min(2 * seconds, LAST_PROBE_SECONDS))
