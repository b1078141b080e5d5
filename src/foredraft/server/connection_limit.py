"""Limit on open connections, derived from the process's limit on open files."""

import logging
import resource
from asyncio import Transport
from dataclasses import dataclass, field

MAX_ACCEPTS = 64  # connections accepted in one turn of the event loop, at most
LISTEN_BACKLOG = 1024  # connections that wait in the kernel, so that a burst is not refused while the loop is busy
RESERVED_FILES = 64  # open files for the model, the log and libraries
ACCEPT_TURNS = 4  # turns of the loop from accepting to closing a connection; each may exceed the limit by one batch
MAX_CONNECTIONS = 1 << 16  # connections, if the number of open files is not limited


@dataclass
class ConnectionLimit:
    """Open connections of one server.

    Above the limit, the connection that has been idle longest is closed: the new one, if all others have a request.
    """

    max_connections: int
    accepts_per_turn: int  # connections accepted in one turn of the event loop
    log: logging.Logger
    idle_connections: dict[Transport, None] = field(default_factory=dict)  # connections without a request, oldest first

    @classmethod
    def from_process_limits(cls, log: logging.Logger) -> "ConnectionLimit":
        """Derive the limit from the process's limit on open files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            files = MAX_CONNECTIONS
        num_accepts = max(1, min(MAX_ACCEPTS, (files - RESERVED_FILES) // (2 * ACCEPT_TURNS)))
        return cls(max(1, min(MAX_CONNECTIONS, files - RESERVED_FILES - ACCEPT_TURNS * num_accepts)), num_accepts, log)

    def admit(self, transport: Transport, num_open: int) -> None:
        """Register a new connection, and close the longest idle one if there are too many.

        Args:
            transport: transport of the new connection.
            num_open: open connections, the new one included.
        """
        self.idle_connections[transport] = None
        if num_open > self.max_connections:
            self.log.warning(
                "%d connections are open, the most that the limit on open files allows; the longest idle is closed",
                self.max_connections,
            )
            oldest = next(iter(self.idle_connections))
            del self.idle_connections[oldest]
            oldest.abort()
