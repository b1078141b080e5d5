"""Memory for weights: pieces that do not overlap, aligned, alive as long as their tensor."""

import gc
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.kernels import arena
from foredraft.kernels.arena import ALIGNMENT, CHUNK_BYTES, Arena

DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.float64]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), min_size=1, max_size=4)), max_size=12))
def test_pieces_are_aligned_and_do_not_overlap(asked: list[tuple[torch.dtype, list[int]]]) -> None:
    here = Arena()
    pieces = [here.allocate(*shape, dtype=dtype) for dtype, shape in asked]
    taken: set[int] = set()
    for piece, (dtype, shape) in zip(pieces, asked, strict=True):
        assert (piece.dtype, list(piece.shape)) == (dtype, shape)
        assert piece.is_contiguous()
        if piece.numel():
            assert piece.data_ptr() % ALIGNMENT == 0
        lines = range(piece.data_ptr() // ALIGNMENT, -(-(piece.data_ptr() + piece.nbytes) // ALIGNMENT))
        assert not taken & set(lines), "two pieces share a cache line"
        taken |= set(lines)


def test_a_copy_holds_the_numbers_of_any_layout() -> None:
    source = torch.arange(60.0).view(3, 4, 5).transpose(0, 2)
    made = Arena().copy(source)
    assert torch.equal(made, source)
    assert made.is_contiguous()
    source.zero_()
    assert made.sum() == sum(range(60))


def test_a_piece_larger_than_a_chunk_has_one_of_its_own() -> None:
    here = Arena()
    first, large, last = (here.allocate(n, dtype=torch.uint8) for n in (10, CHUNK_BYTES + 1, 10))
    for piece in (first, large, last):
        piece[0] = piece[-1] = 7
    assert len(large) == CHUNK_BYTES + 1


def test_a_tensor_outlives_its_arena() -> None:
    piece = Arena().copy(torch.arange(1000))
    gc.collect()
    Arena().allocate(1000, dtype=torch.int64).zero_()
    assert torch.equal(piece, torch.arange(1000))


class WithoutHugePages(mmap.mmap):
    def madvise(self, *advice: int) -> None:
        raise OSError(22, "Invalid argument")


def test_a_system_without_huge_pages_still_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux may be built without them, and then refuses the advice."""
    monkeypatch.setattr(arena.mmap, "mmap", WithoutHugePages)
    assert torch.equal(Arena().copy(torch.arange(9)), torch.arange(9))


def test_another_system_has_memory_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(arena.mmap, "MADV_HUGEPAGE", raising=False)
    assert torch.equal(Arena().copy(torch.arange(9)), torch.arange(9))
