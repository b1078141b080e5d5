"""Compaction of the KV of accepted paths."""

from collections.abc import Sequence

import torch

from foredraft import Sampling
from foredraft.engine.compaction import compact_kv
from foredraft.kv.pool import KVPool, get_slot
from foredraft.request import Batch, Request
from foredraft.tree import Commit
from tests.support.requests import make_request

CPU = torch.device("cpu")
PAGE_SIZE = 4
NUM_SLOTS = 40


def make_pool() -> KVPool:
    """Return a pool in which the key and the value of every slot are its number."""
    numbers = torch.arange(NUM_SLOTS, dtype=torch.float64)[:, None, None]
    pool = KVPool()
    pool.write(0, torch.arange(NUM_SLOTS), numbers, numbers, NUM_SLOTS)
    return pool


def make_held_request(pages: Sequence[int], num_computed: int) -> Request:
    return make_request(-1, [1] * 8, Sampling(), pages=list(pages), num_computed=num_computed)


def compact(requests: Sequence[Request], paths: list[list[int]]) -> list[int]:
    """Return the number that is in each slot after a step that accepted these paths."""
    batch = Batch(tuple(requests), (1,) * len(requests), (5,) * len(requests), PAGE_SIZE)
    pool = make_pool()
    compact_kv(pool, batch, Commit(paths, [[0] * len(path) for path in paths]), CPU)
    keys, values = pool.layers[0]
    assert torch.equal(keys, values)
    return keys[:NUM_SLOTS, 0, 0].int().tolist()


def test_the_kv_of_a_path_follows_that_of_the_computed_tokens() -> None:
    chain, tree, failed = make_held_request([1, 2], 3), make_held_request([5, 4], 2), make_held_request([7], 0)
    slots = compact([chain, tree, failed], [[0, 1, 2], [0, 2, 5], []])
    expected = list(range(NUM_SLOTS))
    for i, node in enumerate([0, 2, 5]):
        expected[get_slot(tree.pages, 2 + i, PAGE_SIZE)] = get_slot(tree.pages, 2 + node, PAGE_SIZE)
    assert slots == expected
    assert slots != list(range(NUM_SLOTS))


def test_chains_and_failed_requests_move_nothing() -> None:
    requests = [make_held_request([1, 2], 3), make_held_request([5, 4], 2)]
    assert compact(requests, [[0, 1, 2], []]) == list(range(NUM_SLOTS))
