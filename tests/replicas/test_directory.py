"""Directory and pool: replicas come, go, stop answering and come back."""

import asyncio

from foredraft.replicas.affinity import AffinityKey
from foredraft.replicas.directory import EXPIRY_SECONDS, Directory, Listing, ReplicaCard
from foredraft.replicas.front_metrics import FrontMetrics
from foredraft.replicas.pool import ReplicaPool

A, B = ReplicaCard("a", "127.0.0.1", 1, 0), ReplicaCard("b", "127.0.0.1", 2, 0)


def later(card: ReplicaCard) -> ReplicaCard:
    return ReplicaCard(card.id, card.host, card.port, card.beat + 1)


def test_a_watcher_hears_of_a_new_replica_at_once_and_of_a_beat_later():
    async def main() -> None:
        directory = Directory()
        first = await directory.watch(0)
        watcher = asyncio.ensure_future(directory.watch(first.version, 60))
        await asyncio.sleep(0)
        await directory.announce(A)
        listing = await asyncio.wait_for(watcher, 5)
        assert listing.cards == (A,)
        await directory.announce(later(A))
        listing = await directory.watch(listing.version, 0.01)
        assert listing.cards == (later(A),)

    asyncio.run(main())


def test_a_replica_that_stops_does_not_come_back_by_a_late_announcement():
    async def main() -> None:
        directory = Directory()
        await directory.announce(A)
        await directory.withdraw("a")
        await directory.announce(later(A))
        listing = await directory.watch(0)
        assert (listing.cards, listing.withdrawn) == ((), frozenset("a"))

    asyncio.run(main())


def test_a_replica_without_a_heartbeat_is_listed_no_more():
    async def main() -> None:
        now = 0.0
        directory = Directory(lambda: now)
        await directory.announce(A)
        now = EXPIRY_SECONDS - 1
        await directory.announce(B)
        now = EXPIRY_SECONDS + 1
        assert (await directory.watch(0)).cards == (B,)

    asyncio.run(main())


def make_pool(*cards: ReplicaCard) -> ReplicaPool:
    pool = ReplicaPool(FrontMetrics())
    pool.update(Listing(1, cards))
    return pool


def test_a_new_directory_that_is_still_empty_removes_nothing():
    pool = make_pool(A, B)
    pool.update(Listing(2, ()))
    assert set(pool.cards) == {"a", "b"}
    pool.update(Listing(3, (), frozenset("a")))
    assert set(pool.cards) == {"b"}


def test_a_replica_that_did_not_answer_returns_with_its_next_heartbeat():
    pool = make_pool(A, B)
    pool.drop(A)
    pool.update(Listing(1, (A, B)))
    assert set(pool.cards) == {"b"}
    pool.update(Listing(1, (later(A), B)))
    assert set(pool.cards) == {"a", "b"}


def test_load_is_counted_beyond_a_drop():
    pool = make_pool(A, B)
    with pool.count(A):
        pool.drop(A)
        assert pool.num_running == 1
        pool.update(Listing(2, (later(A),)))
        card = pool.choose(AffinityKey())
        assert card is not None
        assert card.id == "b"
    assert (pool.num_running, pool.loads) == (0, {})


def test_refused_replicas_are_not_chosen_again():
    pool = make_pool(A, B)
    assert pool.choose(AffinityKey(), {"a"}) == B
    assert pool.choose(AffinityKey(), {"a", "b"}) is None
