"""Attention over paged KV with a tree mask, registered with transformers under one name.

transformers calls it with the rotated queries, keys and values of the packed rows. The forward batch and the KV pool
reach it as keyword arguments of the model. transformers builds no mask for a name without a mask function, so the
forward batch provides the mask.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from foredraft.kernels.attention import can_attend
from foredraft.kernels.operators import attend
from foredraft.kv.int8_rows import dequantize_rows
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import MAX_PADDED_ROWS, AttentionGroup, ForwardBatch
from foredraft.models.padded_rows import PaddedRows
from foredraft.models.recurrent.state_cache import StateCache

ATTENTION_NAME = "foredraft"


def read_implementations(model: Any) -> dict[str, str]:
    """Read the attention names of a model and of its sub-models, as a dict for `set_attn_implementation`.

    The image part of a model may use another implementation than the text part. One name could not restore both.
    """
    config = model.config
    names = {"": config._attn_implementation}
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        if sub_config is not None and sub_config._attn_implementation is not None:  # None: no such part was made
            names[key] = sub_config._attn_implementation
    return names


@dataclass(frozen=True)
class PageAttention:
    """Settings of an attention over pages."""

    scale: float  # factor of the scores
    sliding_window: int | None = None  # maximum number of positions that a row sees, its own included; None = all
    softcap: float | None = None
    sinks: Tensor | None = None  # [Hq]


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
    forward_batch: ForwardBatch | PaddedRows | None = None,
    pool: KVPool | None = None,
    attention_cache: StateCache | None = None,  # names the layer, because layers may share a module
    **unused: Any,  # transformers passes dropout, position_ids and more, which differ by model
) -> tuple[Tensor, None]:
    """Write keys and values to the pool, then attend over the pages of every request.

    Returns:
        Output [1, T, Hq, Dv], and None instead of attention weights.

    Raises:
        RuntimeError: the model was called outside a Foredraft forward pass.
    """
    if forward_batch is None or pool is None:
        raise RuntimeError("this model uses Foredraft's attention; call model.set_attn_implementation('sdpa') first")
    layer = int(module.layer_idx) if attention_cache is None else attention_cache.attention_layer  # type: ignore[arg-type]
    packed_keys, packed_values = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, Hkv, D]
    keys, values = pool.write(layer, forward_batch.write_slots, packed_keys, packed_values, forward_batch.num_slots)
    packed = query[0].transpose(0, 1)  # [T, Hq, D]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention = PageAttention(scale, sliding_window, softcap, s_aux)
    return attend_pages(packed, keys, values, forward_batch, pool, attention)[None], None


def attend_pages(
    packed: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: ForwardBatch | PaddedRows,
    pool: KVPool,
    attention: PageAttention,
) -> Tensor:
    """Attend over the pages of every request. Nothing is written.

    Args:
        packed: queries [T, Hq, D] of the rows, rotated.
        keys: keys [S, Hkv, D] of one layer, as the pool stores them.
        values: values [S, Hkv, Dv] of that layer.
        rows: T packed rows.
        pool: pool of the layer.
        attention: settings.

    Returns:
        [T, Hq, Dv]; float32 from native kernels.
    """
    scale, window, softcap, sinks = attention.scale, attention.sliding_window, attention.softcap, attention.sinks
    sees_ahead = rows.images is not None and rows.images.has_blocks  # which the kernels do not take
    if not sees_ahead and pool.is_native and sinks is None and can_attend(packed, keys, values):
        return attend(packed, keys, values, rows.packed_rows, scale, window or 0, softcap or 0.0)
    if not sees_ahead and pool.kernels is not None and pool.kernels.can_attend(packed, keys, values):
        return pool.kernels.attend(packed, keys, values, rows.device_rows, scale, window or 0, softcap or 0.0, sinks)
    out: Tensor | None = None
    for group in rows.attention_groups:
        q = packed[None] if group.rows is None else packed[group.rows]
        k, v = _gather(keys, group, q.dtype), _gather(values, group, q.dtype)
        if softcap is None and sinks is None:
            o = _attend_sdpa(q, k, v, group, window, scale)
        else:
            o = attend_explicit(q, k, v, group.get_bias(window, q.dtype), scale, softcap, sinks)
        if group.rows is None:
            return o[0].contiguous()  # some models call `view` on it
        if out is None:
            out = o.new_empty(len(packed), *o.shape[2:])
        out[group.rows.flatten()] = o.flatten(0, 1)
    assert out is not None, "a forward batch without rows"
    return out


def _gather(cached: Tensor, group: AttentionGroup, dtype: torch.dtype) -> Tensor:
    """Gather cached keys or values [b, L, H, D]. The result is a view if the slots are contiguous.

    Rows of an int8 pool become numbers of `dtype`.
    """
    if isinstance(group.slots, slice):
        rows = cached[group.slots][None]
    else:
        rows = cached.index_select(0, group.slots.flatten()).view(*group.slots.shape, *cached.shape[1:])
    return dequantize_rows(rows, dtype) if rows.dtype == torch.int8 else rows


def _attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, sliding_window: int | None, scale: float
) -> Tensor:
    """Attend with torch's kernel and return [b, n, Hq, Dv]. Query heads of one key head become rows of that head.

    On CPU the result has the same bits as with enable_gqa, which takes five times as long for one bfloat16 token.
    """
    b, n, heads, width = q.shape
    num_shared = heads // k.shape[2]
    if n > MAX_PADDED_ROWS:  # a prompt chunk: a repeated mask would be large, and the kernel is fast without it
        num_shared = 1
    rows = (
        q.reshape(b, n, -1, num_shared, width).permute(0, 2, 3, 1, 4).flatten(2, 3)
    )  # [b, Hq / num_shared, num_shared * n, D]
    bias = group.get_bias(sliding_window, q.dtype, num_shared)
    o = F.scaled_dot_product_attention(
        rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, scale=scale, enable_gqa=rows.shape[1] != k.shape[2]
    )
    return o.reshape(b, -1, num_shared, n, o.shape[-1]).permute(0, 3, 1, 2, 4).flatten(2, 3)


def attend_explicit(
    q: Tensor,  # [b, n, Hq, D]
    k: Tensor,  # [b, L, Hkv, D]
    v: Tensor,  # [b, L, Hkv, Dv]
    bias: Tensor | None,  # [b, 1, n, L]
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # [Hq]
) -> Tensor:
    """Attend step by step, with soft-caps and attention sinks. This is also the reference of the fast paths.

    Returns:
        [b, n, Hq, Dv].
    """
    num_shared = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(num_shared, 2), v.repeat_interleave(num_shared, 2)
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
