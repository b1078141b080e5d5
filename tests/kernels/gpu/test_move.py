"""Moves of slots in all layers: any permutation, all reads before any write."""

from random import Random

import pytest
import torch

from foredraft.errors import ForedraftError
from tests.support.gpu_cases import DEVICE, TRITON

pytestmark = TRITON
LAYERS = [((40, 2, 8), torch.bfloat16), ((40, 1, 6), torch.bfloat16), ((50, 3, 5), torch.float32)]


@pytest.mark.parametrize("count", [1, 3, 17])
def test_moves_are_those_of_indexing(count: int) -> None:
    from foredraft.kernels.gpu.move import PointerTable, move

    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(DEVICE, dtype)
               for i, (shape, dtype) in enumerate(LAYERS)]  # fmt: skip
    expected = [tensor.clone() for tensor in tensors]
    random = Random(count)
    slots = random.sample(range(40), count + 1)
    sources, targets = (torch.tensor(x, device=DEVICE) for x in (slots[:-1], slots[1:]))  # a cycle, but for one
    for tensor in expected:
        tensor[targets] = tensor[sources].clone()
    move(PointerTable.make(tensors), sources, targets)
    for ours, theirs in zip(tensors, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_what_cannot_be_moved_is_refused() -> None:
    from foredraft.kernels.gpu.move import MAX_MOVES, PointerTable, move

    cache = torch.zeros(4, 1, 2, device=DEVICE)
    many = torch.zeros(MAX_MOVES + 1, dtype=torch.int64, device=DEVICE)
    table = PointerTable.make([cache])
    for sources, targets in ((many, many), (many[:0], many[:0]), (many[:2], many[:1])):
        with pytest.raises(ForedraftError, match=r"moves 1 to \d+ slots to as many"):
            move(table, sources, targets)
    with pytest.raises(ForedraftError, match="multiple of 4"):
        PointerTable.make([cache.half()[:, :, :1].contiguous()])
    with pytest.raises(ForedraftError, match="cache must be contiguous"):
        PointerTable.make([cache.expand(4, 3, 2)])
