"""Stores of keys and values: every row in its slot, no other slot touched, and rotary positions as the models do."""

import pytest
import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import apply_rotary
from tests.support.gpu_cases import DEVICE, TRITON

pytestmark = TRITON
SLOTS = [3, 11, 0, 7, 5]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def make_normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize("slot_type", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_rows_are_copied_to_their_slots_and_padding_is_skipped(dtype: torch.dtype, slot_type: torch.dtype) -> None:
    from foredraft.kernels.gpu.store import store

    # as transformers gives them: rows and heads exchanged in memory, and a width that is no power of two
    k = make_normal(3, 5, 24, dtype=dtype).transpose(0, 1)
    v = make_normal(3, 5, 8, dtype=dtype, seed=1).transpose(0, 1)
    keys, values = make_normal(12, 3, 24, dtype=dtype, seed=2), make_normal(12, 3, 8, dtype=dtype, seed=3)
    expected_keys, expected_values = keys.clone(), values.clone()
    slots = torch.tensor([*SLOTS[:3], -1, SLOTS[4]], dtype=slot_type, device=DEVICE)
    kept = [0, 1, 2, 4]
    expected_keys[slots[kept].long()], expected_values[slots[kept].long()] = k[kept], v[kept]
    store(k, v, slots, keys, values)
    assert torch.equal(keys, expected_keys)
    assert torch.equal(values, expected_values)


@DTYPES
@pytest.mark.parametrize("half", [16, 6], ids=["whole head", "part of a head"])
def test_rotation_is_that_of_the_models_and_is_stored(dtype: torch.dtype, half: int) -> None:
    from foredraft.kernels.gpu.store import rotate_and_store

    q, k, v = make_normal(5, 4, 32, dtype=dtype), make_normal(5, 2, 32, dtype=dtype), make_normal(5, 2, 24, dtype=dtype)
    angles = make_normal(5, half, seed=4) * 9
    keys, values = (torch.full((12, 2, width), torch.nan, dtype=dtype, device=DEVICE) for width in (32, 24))
    slots = torch.tensor([*SLOTS[:4], -1], device=DEVICE)
    rotated = rotate_and_store(q, k, v, angles.cos(), angles.sin(), slots, keys, values)
    factors = (torch.cat([angles.cos()] * 2, -1)[None].double(), torch.cat([angles.sin()] * 2, -1)[None].double())
    for ours, x in ((rotated, q), (keys[slots[:4]], k[:4])):
        rows = len(x)
        wide, parts = x[None].double(), (factors[0][:, :rows], factors[1][:, :rows])
        expected = torch.cat([apply_rotary(wide[..., : 2 * half], parts), wide[..., 2 * half :]], -1)[0]
        torch.testing.assert_close(ours.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-6)
    assert torch.equal(values[slots[:4]], v[:4])
    untouched = [slot for slot in range(12) if slot not in SLOTS[:4]]
    assert keys[untouched].isnan().all()
    assert values[untouched].isnan().all()


def test_what_does_not_fit_the_cache_is_refused() -> None:
    from foredraft.kernels.gpu.store import rotate_and_store, store

    k, keys, slots = make_normal(5, 2, 8), make_normal(12, 2, 8), torch.tensor(SLOTS, device=DEVICE)
    with pytest.raises(ForedraftError, match="do not fit a cache"):
        store(k, k, slots, keys[:, :1].contiguous(), keys)
    with pytest.raises(ForedraftError, match=r"cache has torch\.float32"):
        store(k.half(), k.half(), slots, keys, keys)
    with pytest.raises(ForedraftError, match="values must be contiguous"):
        store(k, k, slots, keys, keys.transpose(0, 1))
    with pytest.raises(ForedraftError, match="half at most 4"):
        rotate_and_store(k, k, k, k[:, 0], k[:, 0], slots, keys, keys)
