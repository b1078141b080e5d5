"""Attention of encoder-decoder models on torch's operators: self-attention and cross-attention of a decoder layer.

Self-attention adds a bias by distance if the model has one. Requests are padded and masked by attention group.
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
    """Attention functions of one forward pass. Slots and masks are computed once, not per layer.

    Args:
        shape: dimensions of the decoder.
        forward_batch: T packed rows.
        pool: self-attention KV.
        cross_kv: cross-attention KV.
        source_pages: pages of the source, by span.
        position_biases: biases [far + 1, H] by distance in tokens, one per layer or one for all; None = no bias.
        dtype: dtype of keys and values.
    """

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
        """Write keys and values [T, H, D] to the pool and attend to each row's own sequence.

        Args:
            layer: index of the layer.
            q: queries [T, H, D].
            k: keys [T, H, D].
            v: values [T, H, D].

        Returns:
            [T, H * D].
        """
        batch = self.forward_batch
        keys, values = self.pool.write(layer, batch.write_slots, k.to(self.dtype), v.to(self.dtype), batch.num_slots)
        out: Tensor | None = None
        for i, group in enumerate(batch.attention_groups):
            mask = self._get_mask(layer, i, group, q.dtype)
            o = self._attend(q, group, _gather(keys, group.slots), _gather(values, group.slots), mask)
            if group.rows is None:
                return o
            out = _scatter(out, o, group, len(q))
        assert out is not None, "a forward batch without rows"
        return out

    def attend_cross(self, layer: int, q: Tensor) -> Tensor:
        """Attend with queries [T, H, D] to each row's source; returns [T, H * D]."""
        keys, values = self.cross_kv.pool.layers[layer]
        out: Tensor | None = None
        for group, (slots, mask) in zip(self.forward_batch.attention_groups, self._source_slots, strict=True):
            o = self._attend(q, group, _gather(keys, slots), _gather(values, slots), mask)
            if group.rows is None:
                return o
            out = _scatter(out, o, group, len(q))
        assert out is not None, "a forward batch without rows"
        return out

    def _attend(self, q: Tensor, group: AttentionGroup, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend in one group; returns [b * n, H * D]."""
        query = (q[None] if group.rows is None else q[group.rows]).transpose(1, 2)
        k, v = k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)
        o = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=self.shape.scale)
        return o.transpose(1, 2).flatten(2).flatten(0, 1)

    def _get_mask(self, layer: int, i: int, group: AttentionGroup, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask [b, 1 or H, n, L]: visibility, and the bias by distance."""
        if self.position_biases is None:
            return group.get_bias(None, dtype)
        layer = layer if len(self.position_biases) > 1 else 0
        if (i, layer) not in self._mask_cache:
            table = self.position_biases[layer].to(dtype)
            distance = group.query_positions[:, :, None] - group.key_positions[:, None, :]
            bias = table[distance.clamp_(0, len(table) - 1)].permute(0, 3, 1, 2)  # [b, H, n, L]
            visibility = group.get_bias(None, dtype)
            self._mask_cache[i, layer] = bias if visibility is None else bias + visibility
        return self._mask_cache[i, layer]

    @cached_property
    def _source_slots(self) -> list[tuple[Tensor, Tensor | None]]:
        """Slots [b, S] of the sources by group, and an additive mask [b, 1, 1, S] if their lengths differ."""
        result = []
        device = self.forward_batch.device
        for group in self.forward_batch.attention_groups:
            sources = [self.source_pages[i] for i in group.span_indices]
            longest = max(source.num_tokens for source in sources)
            slots = torch.zeros(len(sources), longest, dtype=torch.int64)
            mask = torch.zeros(len(sources), 1, 1, longest, dtype=torch.promote_types(self.dtype, torch.bfloat16))
            for row, source in enumerate(sources):
                slots[row, : source.num_tokens] = source.compute_slots()
                mask[row, :, :, source.num_tokens :] = -torch.inf
            is_ragged = any(source.num_tokens < longest for source in sources)
            result.append((slots.to(device), mask.to(device) if is_ragged else None))
        return result


def _gather(cached: Tensor, slots: Tensor | slice) -> Tensor:
    """Gather cached keys or values [b, L, H, D]. The result is a view if the slots are contiguous."""
    if isinstance(slots, slice):
        return cached[slots][None]
    return cached.index_select(0, slots.flatten()).view(*slots.shape, *cached.shape[1:])


def _scatter(out: Tensor | None, rows: Tensor, group: AttentionGroup, total: int) -> Tensor:
    """Write the rows of one group to the packed output of all T rows. The first call allocates it."""
    assert group.rows is not None
    if out is None:
        out = rows.new_empty(total, rows.shape[-1])
    out[group.rows.flatten()] = rows
    return out
