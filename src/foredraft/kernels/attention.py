"""Attention of few query rows over paged KV. A row sees the committed tokens and its own path in the token tree."""

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.cpu.records import KV_KINDS, AttentionRecord
from foredraft.kernels.rows import PackedRows

HEAD_DIM_MULTIPLE = 16  # head widths are whole vectors
MAX_CODE, MIN_SCALE = 127, 1e-32  # of int8 keys and values


def can_attend(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether the native kernel takes queries [T, Hq, D] with keys and values [S, Hkv, D] of these types."""
    return (
        query.device.type == "cpu"
        and keys.dtype in (torch.bfloat16, torch.float32)
        and keys.shape == values.shape
        and keys.is_contiguous()
        and values.is_contiguous()
        and query.shape[-1] % HEAD_DIM_MULTIPLE == 0
    )


def pack_codes(x: Tensor) -> Tensor:
    """Return numbers [S, Hkv, D] as slots of an int8 pool [S, Hkv, D + 4]: codes of all heads, then their scales."""
    scale = x.float().abs().amax(-1) / MAX_CODE  # [S, Hkv]
    codes = (x / scale.clamp_min(MIN_SCALE)[..., None]).round().to(torch.int8)
    slots = torch.cat([codes.flatten(1), scale.contiguous().view(torch.int8)], 1)
    return slots.view(*x.shape[:2], x.shape[2] + scale.element_size())


def attend(
    query: Tensor,  # [T, Hq, D]
    keys: Tensor,  # [S, Hkv, D], or int8 slots [S, Hkv, D + 4] as of pack_codes
    values: Tensor,  # as keys
    rows: PackedRows,
    scale: float,
    sliding: int = 0,  # keys a row sees at most; 0 = all
    softcap: float = 0.0,  # 0 = none
    bias: Tensor | None = None,  # [Hq, far + 1] float32, added to keys far, ..., 1, 0 ranks back; entry 0 also beyond
    sinks: Tensor | None = None,  # [Hq] float32, score of a key without a value
) -> Tensor:
    """Compute attention [T, Hq, D] float32 without copying keys. Raises ForedraftError without native kernels."""
    native = load_library()
    if native is None:
        raise ForedraftError("the native kernels are not installed; run: python -m foredraft.kernels.cpu.build")
    wide = query.float().contiguous()
    out = torch.empty_like(wide)
    job = AttentionRecord(
        wide.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        query.shape[1],
        keys.shape[1],
        query.shape[2],
        KV_KINDS[keys.dtype],
        sliding,
        scale,
        softcap,
        None if bias is None else bias.data_ptr(),
        0 if bias is None else bias.shape[1] - 1,
        None if sinks is None else sinks.data_ptr(),
    )
    native.sync_threads()
    scratch = torch.empty(native.handle.fd_attend_scratch(job, rows.record), dtype=torch.uint8)
    native.handle.fd_attend(job, rows.record, scratch.data_ptr())
    return out


def attend_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: PackedRows,
    scale: float,
    sliding: int = 0,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attend` row by row in float64 torch."""
    shared = query.shape[1] // keys.shape[1]
    out = []
    for row in range(rows.num_rows):
        slots = rows.list_slots(row)[-sliding:]
        k, v = (x[slots].double().repeat_interleave(shared, 1) for x in (keys, values))  # [L, Hq, D]
        scores = torch.einsum("hd,lhd->hl", query[row].double(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            far = bias.shape[1] - 1
            back = torch.arange(len(slots) - 1, -1, -1).clamp_max(far)
            scores = scores + bias[:, far - back]
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].double()], 1)
        out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1)[:, : len(slots)], v))
    return torch.stack(out).float()
