"""Keys and values by slot: writes, growth and compaction against a list of what each slot should hold."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.loading import load_kernels
from foredraft.kv.pool import KVPool, compact_accepted, get_slot, plan_moves
from tests.support.gpu_cases import DEVICE, TRITON

PAGE_SIZE = 4
CPU = torch.device("cpu")


def marks(values: list[int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Make [T, 2, 3] keys and [T, 2, 5] values that encode their number."""
    column = torch.tensor(values, dtype=dtype).view(-1, 1, 1)
    return column.expand(-1, 2, 3), -column.expand(-1, 2, 5)


def read_slots(pool: KVPool, layer: int, slots: list[int]) -> list[int]:
    keys, values = pool.layers[layer]
    assert torch.equal(keys[slots, :, 0], -values[slots, :, 0])
    assert (keys[slots] == keys[slots, :1, :1]).all()
    return [int(x) for x in keys[slots, 0, 0].tolist()]


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=6, unique=True), min_size=1, max_size=8))
def test_growth_keeps_what_was_written_and_new_slots_are_zero(steps: list[list[int]]) -> None:
    pool, naive, number = KVPool(), dict.fromkeys(range(301), 0), 0
    for slots in steps:
        numbers = list(range(number + 1, number + 1 + len(slots)))
        number += len(slots)
        naive |= dict(zip(slots, numbers, strict=True))
        for layer in (0, 3):
            keys, values = pool.write(layer, torch.tensor(slots), *marks(numbers), max(slots) + 1)
            assert keys is pool.layers[layer][0]
            assert values is pool.layers[layer][1]
    size = len(pool.layers[0][0])
    for layer in (0, 3):
        assert read_slots(pool, layer, list(range(min(size, 301)))) == [naive[i] for i in range(min(size, 301))]


Step = tuple[list[list[int]], list[int], list[list[int]]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """(paths, starts, pages) of a step: increasing nodes from 0, as many as a tree may keep."""
    free = list(range(1, 60))
    Random(draw(st.integers(0, 99))).shuffle(free)
    paths, starts, pages = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        start, nodes = draw(st.integers(0, 9)), draw(st.integers(1, 9))
        path = sorted(draw(st.sets(st.integers(1, nodes), max_size=nodes)))
        paths.append([0, *path] if draw(st.booleans()) else [])  # [] = a request that failed
        starts.append(start)
        pages.append([free.pop() for _ in range(-(-(start + nodes + 1) // PAGE_SIZE))])
    return paths, starts, pages


@given(steps())
def test_kept_paths_stand_in_front_and_nothing_else_moves(
    step: tuple[list[list[int]], list[int], list[list[int]]],
) -> None:
    paths, starts, pages = step
    pool, everything = KVPool(), list(range(60 * PAGE_SIZE))
    for layer in (0, 1):
        pool.write(layer, torch.tensor(everything), *marks(everything), len(everything))
    naive = dict(zip(everything, everything, strict=True))
    for path, start, table in zip(paths, starts, pages, strict=True):
        was = [naive[get_slot(table, start + node, PAGE_SIZE)] for node in path]
        naive |= {get_slot(table, start + i, PAGE_SIZE): number for i, number in enumerate(was)}
    compact_accepted(pool, paths, starts, pages, PAGE_SIZE, CPU)
    for layer in (0, 1):
        assert read_slots(pool, layer, everything) == list(naive.values())


def test_a_chain_moves_nothing() -> None:
    assert plan_moves([[0, 1, 2], [0], []], [5, 0, 3], [[1, 2], [3], [4]], PAGE_SIZE) == ([], [])


def test_paths_that_overlap_their_targets_are_read_before_they_are_written() -> None:
    # node 2 -> 1 and node 3 -> 2: an in-place copy, one by one and backwards, would lose node 2
    sources, targets = plan_moves([[0, 2, 3]], [0], [[1]], PAGE_SIZE)
    assert (sources, targets) == ([6, 7], [5, 6])


@TRITON
@pytest.mark.parametrize("max_moves", [1024, 2], ids=["kernel", "more moves than one launch takes"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_pool_on_gpu_kernels_holds_what_one_on_torch_holds(max_moves: int, dtype: torch.dtype) -> None:
    """After it has grown too: the addresses that a move uses must not be those of the freed tensors."""
    kernels = replace(load_kernels(), max_moves=max_moves)
    pools, freed = [KVPool(), KVPool(kernels=kernels).make_empty()], []
    for size, sources, targets in ((9, [5, 6, 8], [4, 5, 6]), (40, [30, 7, 31], [7, 30, 8])):
        numbers = list(range(size, 2 * size))
        for pool in pools:
            for layer in (0, 1):
                keys, values = (x.to(DEVICE) for x in marks(numbers, dtype))
                pool.write(layer, torch.arange(size, device=DEVICE), keys, values, size)
            freed += list(pool.layers.values())  # kept, so that a write to them changes nothing else
            pool.move(torch.tensor(sources, device=DEVICE), torch.tensor(targets, device=DEVICE))
        for layer in (0, 1):
            for ours, theirs in zip(pools[1].layers[layer], pools[0].layers[layer], strict=True):
                assert torch.equal(ours, theirs)
    assert len(freed) == 8


def test_the_check_of_the_null_page_finds_a_write() -> None:
    pool = KVPool()
    pool.write(2, torch.tensor([PAGE_SIZE]), *marks([1]), 2 * PAGE_SIZE)
    pool.check_null_page(PAGE_SIZE)
    pool.write(2, torch.tensor([PAGE_SIZE - 1]), *marks([1]), 2 * PAGE_SIZE)
    with pytest.raises(AssertionError, match="layer 2 were written to the null page"):
        pool.check_null_page(PAGE_SIZE)


def test_a_whole_pool_has_all_slots_at_the_first_write_and_keeps_its_addresses() -> None:
    pool = KVPool(is_whole=True, capacity=40).make_empty()
    pool.capacity = 40  # the engine sets it
    addresses = set()
    for slots in ([1], [39], [0, 7]):
        pool.write(0, torch.tensor(slots), *marks(slots), max(slots) + 1)
        assert [len(x) for x in pool.layers[0]] == [40, 40]
        addresses.add(tuple(x.data_ptr() for x in pool.layers[0]))
    assert len(addresses) == 1
    assert read_slots(pool, 0, [0, 1, 7, 39, 5]) == [0, 1, 7, 39, 0]


@pytest.mark.parametrize(("device", "is_whole"), [("cpu", False), ("cuda", True)])
def test_pools_of_a_gpu_are_whole(device: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.kv.pool.select_kernels", lambda device: None)
    assert KVPool.for_device(torch.device(device)).is_whole == is_whole


def test_too_little_memory_names_the_option_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*shape: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    keys, values = marks([1])
    monkeypatch.setattr(Tensor, "new_zeros", fail)
    with pytest.raises(ForedraftError, match=r"2 MiB for 65536 tokens.*--kv-memory"):
        KVPool(is_whole=True, capacity=65536).write(0, torch.tensor([1]), keys, values, 2)
