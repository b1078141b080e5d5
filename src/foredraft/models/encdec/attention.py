"""The two attentions of a decoder layer on torch's operators: over the text so far, with a bias by distance where the
model has one, and over the source. The groups of the window are padded and masked.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.kv.pool import KVPool
from foredraft.models.encdec.cross_kv import CrossKVCache, SourcePages
from foredraft.models.encdec.decoder import DecoderShape
from foredraft.models.forward_batch import AttentionGroup, ForwardBatch


class Seq2SeqAttention:
    """Attention of one forward pass. Everything that does not depend on the layer is made once."""

    def __init__(
        self,
        shape: DecoderShape,
        forward_batch: ForwardBatch,
        pool: KVPool,
        cross_kv: CrossKVCache,
        source_pages: Sequence[SourcePages],
        position_biases: tuple[Tensor, ...] | None,
        dtype: torch.dtype,
    ) -> None:
        """biases: [far + 1, H] by distance, of every layer or one for all. dtype: of keys and values."""
        self.shape, self.forward_batch, self.pool, self.cross_kv, self.source_pages = (
            shape,
            forward_batch,
            pool,
            cross_kv,
            source_pages,
        )
        self.position_biases, self.dtype = position_biases, dtype
        self._mask_cache: dict[tuple[int, int], Tensor | None] = {}

    def attend_self(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[T, H * D] from queries, keys and values [T, H, D] of the rows themselves, which are kept."""
        window = self.forward_batch
        keys, values = self.pool.write(layer, window.write_slots, k.to(self.dtype), v.to(self.dtype), window.num_slots)
        out: Tensor | None = None
        for i, group in enumerate(window.attention_groups):
            mask = self._get_mask(layer, i, group, q.dtype)
            o = self._attend(q, group, _gather(keys, group.slots), _gather(values, group.slots), mask)
            if group.rows is None:
                return o
            out = _scatter(out, o, group, len(q))
        assert out is not None, "a window without rows"
        return out

    def attend_cross(self, layer: int, q: Tensor) -> Tensor:
        """[T, H * D] from queries [T, H, D] over each row's source."""
        keys, values = self.cross_kv.pool.layers[layer]
        out: Tensor | None = None
        for group, (slots, mask) in zip(self.forward_batch.attention_groups, self._source_slots, strict=True):
            o = self._attend(q, group, _gather(keys, slots), _gather(values, slots), mask)
            if group.rows is None:
                return o
            out = _scatter(out, o, group, len(q))
        assert out is not None, "a window without rows"
        return out

    def _attend(self, q: Tensor, group: AttentionGroup, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[b * n, H * D]"""
        query = (q[None] if group.rows is None else q[group.rows]).transpose(1, 2)
        k, v = k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)
        o = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=self.shape.scale)
        return o.transpose(1, 2).flatten(2).flatten(0, 1)

    def _get_mask(self, layer: int, i: int, group: AttentionGroup, dtype: torch.dtype) -> Tensor | None:
        """[b, 1 or H, n, L]: what may be seen, and the bias by distance."""
        if self.position_biases is None:
            return group.get_bias(None, dtype)
        layer = layer if len(self.position_biases) > 1 else 0
        if (i, layer) not in self._mask_cache:
            table = self.position_biases[layer].to(dtype)
            distance = group.query_positions[:, :, None] - group.key_positions[:, None, :]
            bias = table[distance.clamp_(0, len(table) - 1)].permute(0, 3, 1, 2)  # [b, H, n, L]
            unseen = group.get_bias(None, dtype)
            self._mask_cache[i, layer] = bias if unseen is None else bias + unseen
        return self._mask_cache[i, layer]

    @cached_property
    def _source_slots(self) -> list[tuple[Tensor, Tensor | None]]:
        """For every group the slots [b, S] of its requests' sources, and a mask [b, 1, 1, S] where lengths differ."""
        found = []
        device = self.forward_batch.device
        for group in self.forward_batch.attention_groups:
            places = [self.source_pages[i] for i in group.span_indices]
            longest = max(place.num_tokens for place in places)
            slots = torch.zeros(len(places), longest, dtype=torch.int64)
            mask = torch.zeros(len(places), 1, 1, longest, dtype=torch.promote_types(self.dtype, torch.bfloat16))
            for row, place in enumerate(places):
                slots[row, : place.num_tokens] = place.compute_slots()
                mask[row, :, :, place.num_tokens :] = -torch.inf
            is_ragged = any(place.num_tokens < longest for place in places)
            found.append((slots.to(device), mask.to(device) if is_ragged else None))
        return found


def _gather(cached: Tensor, slots: Tensor | slice) -> Tensor:
    """[b, L, H, D]: a view where the slots are contiguous."""
    if isinstance(slots, slice):
        return cached[slots][None]
    return cached.index_select(0, slots.flatten()).view(*slots.shape, *cached.shape[1:])


def _scatter(out: Tensor | None, rows: Tensor, group: AttentionGroup, total: int) -> Tensor:
    """The rows of one group at their places in the packed window."""
    assert group.rows is not None
    if out is None:
        out = rows.new_empty(total, rows.shape[-1])
    out[group.rows.flatten()] = rows
    return out
