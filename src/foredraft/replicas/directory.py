"""Directory in which replicas announce their addresses to the fronts."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

BEAT_SECONDS = 5.0  # seconds between two announcements of a replica
EXPIRY_SECONDS = 30.0  # seconds without one, after which a replica is no longer listed
WATCH_SECONDS = 5.0  # longest wait for a change, after which the current beats are returned


@dataclass(frozen=True)
class ReplicaCard:
    """Address of a replica."""

    id: str
    host: str
    port: int
    beat: int  # number of this announcement, from 0 up


@dataclass(frozen=True)
class Listing:
    """Replicas at one time."""

    version: int
    cards: tuple[ReplicaCard, ...]
    withdrawn: frozenset[str] = frozenset()  # replicas that stop


class Directory:
    """Announced replicas.

    A new directory is empty until the next announcements, so that a replica which is not listed may still run.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._version = time.time_ns()  # differs from every version of an earlier directory
        self._cards: dict[str, ReplicaCard] = {}
        self._times: dict[str, float] = {}  # time of the last announcement; of a withdrawn replica too
        self._withdrawn: set[str] = set()
        self._changed = asyncio.Event()

    async def announce(self, card: ReplicaCard) -> None:
        """List a replica, or confirm that it still runs. Ignored after `withdraw`."""
        if card.id in self._withdrawn:
            return
        is_new = card.id not in self._cards
        self._cards[card.id], self._times[card.id] = card, self._clock()
        if is_new:
            self._publish()

    async def withdraw(self, replica: str) -> None:
        """Remove a replica that stops."""
        self._cards.pop(replica, None)
        self._withdrawn.add(replica)
        self._times[replica] = self._clock()
        self._publish()

    async def watch(self, version: int, seconds: float = WATCH_SECONDS) -> Listing:
        """Return the listing as soon as its version differs from `version`, or after `seconds`."""
        self._expire()
        changed = self._changed
        if version == self._version:
            try:
                async with asyncio.timeout(seconds):
                    await changed.wait()
            except TimeoutError:
                self._expire()
        return Listing(self._version, tuple(self._cards.values()), frozenset(self._withdrawn))

    def _expire(self) -> None:
        oldest = self._clock() - EXPIRY_SECONDS
        for name in [name for name, seconds in self._times.items() if seconds < oldest]:
            del self._times[name]
            self._withdrawn.discard(name)
            if self._cards.pop(name, None) is not None:
                self._publish()

    def _publish(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
