"""The store of responses against a slow reference: what is listed, what is counted, and what a chain keeps."""

import random

from foredraft.server.responses_api.response_store import ResponseStore
from foredraft.server.responses_api.stored_response import StoredResponse


def make(name: str, parent: StoredResponse | None = None, size: int = 10, owner: bytes = b"a") -> StoredResponse:
    items, body = b'[{"t": 1}]', b'{"output": [{"t": 2}]}'
    return StoredResponse(name, owner, "m", parent, items, body + b" " * (size - len(items) - len(body)))


def count_bytes(store: ResponseStore) -> int:
    """Count the bytes of all responses that a listed one needs, each once."""
    return sum(node.num_bytes for node in {node for listed in store._listed.values() for node in listed.chain})


def test_bytes_are_those_of_all_chains_after_any_operation():
    """A wrong count would fill the memory, or evict for ever."""
    chance = random.Random(3)
    store, known = ResponseStore(12, 4000), []
    for number in range(1500):
        parent = chance.choice(known[-20:]) if known and chance.random() < 0.7 else None
        if parent is not None and chance.random() < 0.2:
            store.delete(parent.owner, parent.id)
        else:
            known.append(make(str(number % 400), parent, chance.randrange(40, 400)))
            store.add(known[-1])
        assert store.num_bytes == count_bytes(store) <= store.max_bytes
        assert len(store) <= store.max_responses
        assert set(store._num_users) == {node for listed in store._listed.values() for node in listed.chain}


def test_a_chain_survives_the_eviction_of_its_beginning():
    store, last = ResponseStore(2, 10_000), None
    for number in range(6):
        last = make(str(number), last, 100)
        store.add(last)
    assert (len(store), store.num_bytes) == (2, 600)
    assert store.find(b"a", "3") is None
    assert store.find(b"a", "5") is last
    assert len(last.list_conversation()) == 11  # six inputs, five outputs
    store.add(make("x"))
    store.add(make("y"))
    assert store.num_bytes == count_bytes(store) < 100


def test_a_response_above_the_bound_is_not_kept():
    store = ResponseStore(5, 100)
    store.add(make("small", size=60))
    store.add(make("large", size=101))
    assert (len(store), store.num_bytes) == (0, 0)
