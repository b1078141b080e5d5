"""Stores of keys and values to paged KV: of finished keys, and fused with rotary position embeddings."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.checks import check_contiguous

NUM_WARPS = 4


@triton.jit(do_not_specialize=["k_row", "k_head", "v_row", "v_head"])
def store_rows(
    k, v, slots, keys, values, k_row, k_head, v_row, v_head,
    D: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Copy one row of keys and values to its slot. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:  # padding of a captured pass
        return
    i, j = tl.arange(0, KP), tl.arange(0, VP)
    from_key = tl.load(k + row * k_row + i // D * k_head + i % D, mask=i < HEADS * D)
    from_value = tl.load(v + row * v_row + j // DV * v_head + j % DV, mask=j < HEADS * DV)
    tl.store(keys + slot * HEADS * D + i, from_key, mask=i < HEADS * D)
    tl.store(values + slot * HEADS * DV + j, from_value, mask=j < HEADS * DV)


@triton.jit
def rotate_pair(x, offset, cos, sin, target, HALF: tl.constexpr, PAD: tl.constexpr):
    """Rotate the first 2 * HALF numbers of a head: number i by the angle of number i + HALF."""
    i = tl.arange(0, PAD)
    is_pair = i < HALF
    a = tl.load(x + offset + i, mask=is_pair).to(tl.float32)
    b = tl.load(x + offset + HALF + i, mask=is_pair).to(tl.float32)
    c, s = tl.load(cos + i, mask=is_pair).to(tl.float32), tl.load(sin + i, mask=is_pair).to(tl.float32)
    kind = target.dtype.element_ty
    tl.store(target + i, (a * c - b * s).to(kind), mask=is_pair)
    tl.store(target + HALF + i, (b * c + a * s).to(kind), mask=is_pair)


@triton.jit
def copy_rest(x, offset, target, BEGIN: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr):
    """Copy the numbers of a head that are not rotated."""
    i = tl.arange(0, PAD)
    is_rest = (i >= BEGIN) & (i < D)
    tl.store(target + i, tl.load(x + offset + i, mask=is_rest), mask=is_rest)


@triton.jit(do_not_specialize=["q_row", "q_head", "k_row", "k_head", "v_row", "v_head"])
def rotate_and_store_rows(
    q, k, v, cos, sin, slots, rotated, keys, values, q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, PAD: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """Rotate one head of one row; a key and its value go to their slot. Grid (rows, HEADS + KV_HEADS)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += row * HALF
    sin += row * HALF
    if head < HEADS:
        target = rotated + (row * HEADS + head) * D
        rotate_pair(q, row * q_row + head * q_head, cos, sin, target, HALF, HALF_PAD)
        if D > 2 * HALF:
            copy_rest(q, row * q_row + head * q_head, target, 2 * HALF, D, PAD)
        return
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    kv_head = head - HEADS
    target = keys + (slot * KV_HEADS + kv_head) * D
    rotate_pair(k, row * k_row + kv_head * k_head, cos, sin, target, HALF, HALF_PAD)
    if D > 2 * HALF:
        copy_rest(k, row * k_row + kv_head * k_head, target, 2 * HALF, D, PAD)
    copy_rest(v, row * v_row + kv_head * v_head, values + (slot * KV_HEADS + kv_head) * DV, 0, DV, VALUE_PAD)


def store(
    k: Tensor,  # [T, H, D]
    v: Tensor,  # [T, H, Dv]
    slots: Tensor,  # [T]
    keys: Tensor,  # [S, H, D]
    values: Tensor,  # [S, H, Dv]
) -> None:
    """Copy keys and values of T rows to their slots; a row with a negative slot is skipped.

    Raises:
        ForedraftError: shapes or types differ from those of the cache.
    """
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    _check_cache(k, v, slots, keys, values)
    heads, d, dv = k.shape[1], k.shape[2], v.shape[2]
    with torch.cuda.device_of(k):  # triton launches on the current device
        store_rows[(len(k),)](
            k, v, slots, keys, values, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            D=d, DV=dv, HEADS=heads, KP=triton.next_power_of_2(heads * d), VP=triton.next_power_of_2(heads * dv),
            num_warps=NUM_WARPS,
        )  # fmt: skip


def rotate_and_store(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, H, D]
    v: Tensor,  # [T, H, Dv]
    cos: Tensor,  # [T, half]
    sin: Tensor,  # [T, half]
    slots: Tensor,  # [T]
    keys: Tensor,  # [S, H, D]
    values: Tensor,  # [S, H, Dv]
) -> Tensor:
    """Rotate queries and keys by position, and store keys and values; a row with a negative slot stores nothing.

    The first 2 * half numbers of a head are rotated, number i with number i + half, in float32 with one rounding.

    Returns:
        Rotated queries [T, Hq, D].

    Raises:
        ForedraftError: shapes or types do not fit each other.
    """
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    cos, sin = cos.contiguous(), sin.contiguous()
    _check_cache(k, v, slots, keys, values)
    (num_rows, heads, d), kv_heads, dv, half = q.shape, k.shape[1], v.shape[2], cos.shape[1]
    if cos.shape != sin.shape or len(cos) != num_rows or 2 * half > d or (len(k), k.shape[2]) != (num_rows, d):
        raise ForedraftError(
            f"queries {list(q.shape)} and keys {list(k.shape)} need cos and sin [{num_rows}, half] with half at most "
            f"{d // 2}; got {list(cos.shape)} and {list(sin.shape)}"
        )
    rotated = q.new_empty(q.shape)
    with torch.cuda.device_of(k):
        rotate_and_store_rows[(num_rows, heads + kv_heads)](
            q, k, v, cos, sin, slots, rotated, keys, values,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            HEADS=heads, KV_HEADS=kv_heads, D=d, DV=dv, HALF=half, HALF_PAD=triton.next_power_of_2(half),
            PAD=triton.next_power_of_2(d), VALUE_PAD=triton.next_power_of_2(dv), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return rotated


def _check_cache(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    check_contiguous(slots=slots, keys=keys, values=values)
    fits = k.shape[1:] == keys.shape[1:] and v.shape[1:] == values.shape[1:] and len(k) == len(v) == len(slots)
    if not fits or k.shape[1] != v.shape[1]:
        raise ForedraftError(
            f"keys {list(k.shape)} and values {list(v.shape)} of {len(slots)} slots do not fit a cache of "
            f"{list(keys.shape)} and {list(values.shape)}"
        )
    if (k.dtype, v.dtype) != (keys.dtype, values.dtype):
        raise ForedraftError(f"keys are {k.dtype} and values {v.dtype}; the cache has {keys.dtype}, {values.dtype}")
