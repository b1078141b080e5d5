"""How many connections may be open at once: as many as there are files for, with some left for everything else."""

import logging
import resource
from asyncio import Transport
from dataclasses import dataclass, field

ACCEPTED = 64  # connections the event loop takes in one turn, at most
QUEUE = 1024  # connections that wait in the kernel: a burst is not sent away while the loop is busy
OWN = 64  # files for the model, the log and what a library opens
TURNS = 4  # of the loop from taking a connection to having closed it: so many batches of ACCEPTED may be too many
MOST = 1 << 16


@dataclass
class Room:
    """The connections of one server. Once it is full, a new one takes the place of the one that has been without a
    request for longest; where every other has one, the new one has to go."""

    most: int
    accepted: int  # in one turn of the loop
    log: logging.Logger
    idle: dict[Transport, None] = field(default_factory=dict)  # without a request, the oldest first

    @classmethod
    def of_process(cls, log: logging.Logger) -> "Room":
        """From the process's limit on open files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            files = MOST
        accepted = max(1, min(ACCEPTED, (files - OWN) // (2 * TURNS)))
        return cls(max(1, min(MOST, files - OWN - TURNS * accepted)), accepted, log)

    def admit(self, transport: Transport, num_open: int) -> None:
        """A connection was made; `num_open` counts it too."""
        self.idle[transport] = None
        if num_open > self.most:
            self.log.warning(
                "%d connections are open, the most that the limit on open files allows; the longest idle is closed",
                self.most,
            )
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            oldest.abort()
