"""Native layout of adapters: the dense product, without the zeros of a block diagonal, and the sorting of rows."""

import ctypes

import pytest
import torch

from foredraft.kernels.arena import Arena
from foredraft.kernels.low_rank import MAX_GROUP, OUTPUT_BLOCK, AdaptedRows, LowRank, LowRankLayers


def make_matrices(rank: int, k: int, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, k, generator=generator), torch.randn(n, rank, generator=generator)


@pytest.mark.parametrize(("rank", "k", "n"), [(1, 8, 16), (4, 24, 64), (7, 33, 41), (40, 16, 100)])
def test_the_reference_is_the_dense_product(rank, k, n):
    a, b = make_matrices(rank, k, n)
    x = torch.randn(5, k, generator=torch.Generator().manual_seed(9))
    found = LowRank.pack(a, b, Arena()).compute_reference(x)
    expected = (x.double() @ a.double().T @ b.double().T).float()
    assert found.shape[1] % 32 == 0
    assert torch.allclose(found[:, :n], expected, atol=1e-5)
    assert not found[:, n:].any()


def test_zeros_beside_the_blocks_are_not_stored():
    """Query, key and value of ranks 4, 2 and 3 are one product; one of their rows may be zero all the same."""
    a, _ = make_matrices(9, 16, 1)
    b = torch.block_diag(*(make_matrices(rank, 1, n)[1] for rank, n in ((4, 64), (2, 16), (3, 16))))
    b[64:80] = 0
    packed = LowRank.pack(a, b, Arena())
    column, width, offset = packed.tables.tolist()
    assert column == [0, 0, 0, 0, 0, 6]
    assert width == [4, 4, 4, 4, 0, 3]
    assert offset == [0, 64, 128, 192, 256, 256]
    assert packed.b.shape == (sum(width), OUTPUT_BLOCK)


def make_layers(seed: int, products: dict[str, int]) -> LowRankLayers:
    """Changes of one layer, whose products have 16 inputs and 32 outputs."""
    changes = {name: LowRank.pack(*make_matrices(rank, 16, 32, seed), Arena()) for name, rank in products.items()}
    return LowRankLayers.build([changes], [dict.fromkeys(("qkv", "out", "gate_up", "down"), 16)], kind=1)


def read_list(address: int, count: int, kind=ctypes.c_int32) -> list[int]:
    return list((kind * count).from_address(address))


def test_rows_are_sorted_by_adapter_in_groups():
    one, two = make_layers(1, {"qkv": 4}), make_layers(2, {"qkv": 2, "down": 6})
    rows = AdaptedRows.pack([two, None, one, two], [2, 3, MAX_GROUP + 1, 1])
    record, total = rows.record, MAX_GROUP + 7
    assert (record.num_places, record.num_groups, record.max_rank) == (MAX_GROUP + 4, 3, 6)
    assert record.products == 0b1001  # query, key and value; down
    sorted_rows = [0, 1, total - 1, *range(5, total - 1)]
    assert read_list(record.row, record.num_places) == sorted_rows
    assert read_list(record.first, 4) == [0, 3, 3 + MAX_GROUP, record.num_places]
    assert read_list(record.group, record.num_places) == [0] * 3 + [3] * MAX_GROUP + [3 + MAX_GROUP]
    places = read_list(record.place, total)
    assert [places[row] for row in sorted_rows] == list(range(record.num_places))
    assert places[2:5] == [-1] * 3
    changes = read_list(record.change, record.num_places, ctypes.c_uint64)
    assert changes == [ctypes.addressof(two.layers)] * 3 + [ctypes.addressof(one.layers)] * (MAX_GROUP + 1)


def test_bytes_are_those_of_the_matrices():
    assert make_layers(1, {"qkv": 4}).num_bytes == 4 * (16 * 32 + 4 * 32)  # A has whole panels of 32 rows
