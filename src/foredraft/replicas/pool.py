"""Replicas that the front knows, their running requests, and those that do not answer."""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from foredraft.replicas.affinity import AffinityKey, AffinityRouter, make_replica_tag
from foredraft.replicas.directory import Listing, ReplicaCard
from foredraft.replicas.front_metrics import FrontMetrics


class ReplicaPool:
    """Replicas of one front.

    Args:
        metrics: counts the choices.
    """

    def __init__(self, metrics: FrontMetrics) -> None:
        self.metrics = metrics
        self.cards: dict[str, ReplicaCard] = {}
        self.loads: dict[str, int] = {}  # running requests; stays until the last request of a dropped replica ends
        self.has_started = threading.Event()  # a replica was listed
        self._router = AffinityRouter()
        self._failed_beats: dict[str, int] = {}  # replica that did not answer -> its beat at that time

    def update(self, listing: Listing) -> None:
        """Take over a listing. A replica that did not answer returns with its next heartbeat."""
        for name in listing.withdrawn & self.cards.keys():
            self._remove(name)
        for card in listing.cards:
            if card.beat > self._failed_beats.get(card.id, -1):
                self._failed_beats.pop(card.id, None)
                self.cards[card.id] = card
                self.has_started.set()

    def choose(self, key: AffinityKey, refused: Collection[str] = ()) -> ReplicaCard | None:
        """Choose a replica for a request; None if there is none.

        A request that names a stored response has no other replica than the one that has it, while that runs.

        Args:
            key: of the request.
            refused: replicas that cannot take it.
        """
        loads = {name: self.loads.get(name, 0) for name in self.cards if name not in refused}
        holder = self._find_holder(key)
        if not loads or holder in refused:
            return None
        if holder is not None:
            self.metrics.choices["stored"] += 1
            return self.cards[holder]
        choice = self._router.choose(key, loads)
        self.metrics.choices[choice.reason] += 1
        return self.cards[choice.replica]

    def _find_holder(self, key: AffinityKey) -> str | None:
        """Return the replica that has the stored response which a request names; None if there is none."""
        if key.replica_tag is None:
            return None
        tags = {make_replica_tag(card.host, card.port): name for name, card in self.cards.items()}
        return tags.get(key.replica_tag)

    @contextmanager
    def count(self, card: ReplicaCard) -> Iterator[None]:
        """Count a running request of a replica."""
        self.loads[card.id] = self.loads.get(card.id, 0) + 1
        try:
            yield
        finally:
            self.loads[card.id] -= 1
            if not self.loads[card.id]:
                del self.loads[card.id]

    def drop(self, card: ReplicaCard) -> None:
        """Choose a replica no longer, as it does not answer."""
        self._failed_beats[card.id] = max(card.beat, self._failed_beats.get(card.id, -1))
        if card.id in self.cards:
            self._failed_beats[card.id] = max(self._failed_beats[card.id], self.cards[card.id].beat)
            self._remove(card.id)

    @property
    def num_running(self) -> int:
        """Running requests of all replicas."""
        return sum(self.loads.values())

    def _remove(self, name: str) -> None:
        del self.cards[name]
        self._router.forget(name)
