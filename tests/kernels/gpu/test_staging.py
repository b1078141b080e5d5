"""Staged inputs: lists of one block, at aligned addresses, copied together."""

import torch

from foredraft.kernels.gpu.staging import StagingBlock
from tests.support.gpu_cases import DEVICE

FIELDS = {
    "a": ((3,), torch.int32),
    "b": ((2, 3), torch.int64),
    "c": ((1, 0), torch.int64),
    "d": ((5,), torch.float64),
}


def test_lists_are_copied_together_to_fixed_addresses() -> None:
    block = StagingBlock.make(FIELDS, torch.device(DEVICE))
    addresses = {name: x.data_ptr() for name, x in block.device.items()}
    for round_trip in range(2):
        block.host["a"][:] = torch.tensor([1, 2, 3]) + round_trip
        block.host["b"][:] = (1 << 40) + round_trip
        block.host["d"][:] = 0.1 * (1 + round_trip)
        block.upload()
        assert block.device["a"].tolist() == [1 + round_trip, 2 + round_trip, 3 + round_trip]
        assert (block.device["b"] == (1 << 40) + round_trip).all()
        assert block.device["d"].tolist() == [0.1 * (1 + round_trip)] * 5
    assert {name: x.data_ptr() for name, x in block.device.items()} == addresses
    base = block.device_block.data_ptr()
    assert all((x.data_ptr() - base) % 16 == 0 for x in block.device.values() if x.numel())
    assert {name: (tuple(x.shape), x.dtype) for name, x in block.device.items()} == FIELDS
