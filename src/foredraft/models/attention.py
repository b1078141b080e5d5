"""Attention over paged KV with a tree mask, registered with transformers under one name.

transformers calls it with rotated queries, keys and values of the packed rows, and passes our window through as an
ordinary keyword. A name it has no mask function for gets no mask from it: the window brings its own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from foredraft.kernels.attention import can_attend
from foredraft.kernels.operators import attend
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import MAX_PADDED_ROWS, AttentionGroup, ForwardBatch

ATTENTION_NAME = "foredraft"


def read_implementations(model: Any) -> dict[str, str]:
    """Names of the attention of a model and of its parts, a dict for `set_attn_implementation`.

    Parts for images may have another one than the text, so that one name for all would not bring them back.
    """
    config = model.config
    found = {"": config._attn_implementation}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            found[key] = part._attn_implementation
    return found


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, Dv]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [Hq] attention sinks
    forward_batch: ForwardBatch | None = None,
    pool: KVPool | None = None,
    **unused: Any,  # transformers passes dropout, position_ids and more, which differ by model
) -> tuple[Tensor, None]:
    """[1, T, Hq, Dv]. Raises RuntimeError when called outside a Foredraft forward pass."""
    if forward_batch is None or pool is None:
        raise RuntimeError(
            "this model was given Foredraft's attention; call model.set_attn_implementation('sdpa') first"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    packed_keys, packed_values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, Hkv, D]
    keys, values = pool.write(layer, forward_batch.write_slots, packed_keys, packed_values, forward_batch.num_slots)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    packed = query[0].transpose(0, 1)  # [T, Hq, D]
    if pool.is_native and s_aux is None and can_attend(packed, keys, values):
        return attend(packed, keys, values, forward_batch.packed_rows, scale, sliding_window or 0, softcap or 0.0)[
            None
        ], None
    out: Tensor | None = None
    for group in forward_batch.attention_groups:
        k, v = _gather(keys, group), _gather(values, group)
        q = packed[None] if group.rows is None else packed[group.rows]
        if softcap is None and s_aux is None:
            o = _attend_sdpa(q, k, v, group, sliding_window, scale)
        else:
            o = attend_explicit(q, k, v, group.get_bias(sliding_window, q.dtype), scale, softcap, s_aux)
        if group.rows is None:
            return o, None
        if out is None:
            out = o.new_empty(len(packed), *o.shape[2:])
        out[group.rows.flatten()] = o.flatten(0, 1)
    assert out is not None, "a window without rows"
    return out[None], None


def _gather(cached: Tensor, group: AttentionGroup) -> Tensor:
    """[b, L, H, D]: a view where the slots are contiguous."""
    if isinstance(group.slots, slice):
        return cached[group.slots][None]
    return cached.index_select(0, group.slots.flatten()).view(*group.slots.shape, *cached.shape[1:])


def _attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, sliding_window: int | None, scale: float
) -> Tensor:
    """[b, n, Hq, Dv]. Query heads that share a key head become further rows of it.

    On CPU the bits are those of enable_gqa, which takes five times as long for one token in bfloat16.
    """
    b, n, heads, width = q.shape
    shared = heads // k.shape[2]
    if n > MAX_PADDED_ROWS:  # a prompt: the mask would grow, and the kernel is at its best as it is
        shared = 1
    rows = q.reshape(b, n, -1, shared, width).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [b, Hq / shared, shared * n, D]
    bias = group.get_bias(sliding_window, q.dtype, shared)
    o = F.scaled_dot_product_attention(
        rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, scale=scale, enable_gqa=rows.shape[1] != k.shape[2]
    )
    return o.reshape(b, -1, shared, n, o.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)


def attend_explicit(
    q: Tensor,  # [b, n, Hq, D]
    k: Tensor,  # [b, L, Hkv, D]
    v: Tensor,  # [b, L, Hkv, Dv]
    bias: Tensor | None,  # [b, 1, n, L]
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [Hq]
) -> Tensor:
    """[b, n, Hq, Dv]. Attention written out: for soft-caps and sinks, and the reference of the fast ones."""
    shared = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * scale  # [b, Hq, n, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.to(wide).softmax(-1).to(v.dtype)[..., : k.shape[1]]
    return (weights @ v.transpose(1, 2)).transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
