"""Packed weights that are equal are one object; all others are packed as without an index."""

import torch

from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PackedWeight
from foredraft.kernels.quantize import select_packers
from foredraft.kernels.weight_sharing import WeightIndex


def test_only_equal_weights_are_shared():
    torch.manual_seed(0)
    weight, bias, arena = torch.randn(64, 48).bfloat16(), torch.randn(64), Arena()
    changed = weight.clone()
    changed[63, 47] += 1  # the last number; the first ones, by which weights are found, are equal
    for pack in (*select_packers(None), *select_packers("int4")):
        own = pack(weight, bias, arena)
        share = WeightIndex.from_weights([own, pack(weight.T.contiguous(), None, arena)]).share(pack)
        assert share(weight, bias, arena) is own
        for other, other_bias in ((changed, bias), (weight, None), (weight, bias + 1), (weight[:32], bias[:32])):
            found, expected = share(other, other_bias, arena), pack(other, other_bias, Arena())
            assert found is not own
            assert torch.equal(found.data, expected.data)
    assert WeightIndex.from_weights([]).find(PackedWeight.pack(weight, None, arena)) is None
