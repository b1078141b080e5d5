"""The two attentions of a decoder layer on torch's operators: over the text so far, with a bias by distance where the
model has one, and over the source. The groups of the window are padded and masked.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.kv.pool import KVPool
from foredraft.models.encdec_decoder import Shape
from foredraft.models.encdec_memory import Place, SourceMemory
from foredraft.models.window import Group, Window


class Sight:
    """What the rows of one pass see. Whatever does not depend on the layer is made once."""

    def __init__(
        self,
        shape: Shape,
        window: Window,
        pool: KVPool,
        memory: SourceMemory,
        places: Sequence[Place],
        biases: tuple[Tensor, ...] | None,
        dtype: torch.dtype,
    ) -> None:
        """biases: [far + 1, H] by distance, of every layer or one for all. dtype: of keys and values."""
        self.shape, self.window, self.pool, self.memory, self.places = shape, window, pool, memory, places
        self.biases, self.dtype = biases, dtype
        self._masks: dict[tuple[int, int], Tensor | None] = {}

    def own(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[T, H * D] from queries, keys and values [T, H, D] of the rows themselves, which are kept."""
        window = self.window
        keys, values = self.pool.write(layer, window.write, k.to(self.dtype), v.to(self.dtype), window.num_slots)
        out: Tensor | None = None
        for i, group in enumerate(window.groups):
            mask = self._mask(layer, i, group, q.dtype)
            o = self._attend(q, group, _gather(keys, group.slots), _gather(values, group.slots), mask)
            if group.rows is None:
                return o
            out = _scattered(out, o, group, len(q))
        assert out is not None, "a window without rows"
        return out

    def cross(self, layer: int, q: Tensor) -> Tensor:
        """[T, H * D] from queries [T, H, D] over each row's source."""
        keys, values = self.memory.pool.layers[layer]
        out: Tensor | None = None
        for group, (slots, mask) in zip(self.window.groups, self._sources, strict=True):
            o = self._attend(q, group, _gather(keys, slots), _gather(values, slots), mask)
            if group.rows is None:
                return o
            out = _scattered(out, o, group, len(q))
        assert out is not None, "a window without rows"
        return out

    def _attend(self, q: Tensor, group: Group, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[b * n, H * D]"""
        query = (q[None] if group.rows is None else q[group.rows]).transpose(1, 2)
        k, v = k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)
        o = F.scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=self.shape.scale)
        return o.transpose(1, 2).flatten(2).flatten(0, 1)

    def _mask(self, layer: int, i: int, group: Group, dtype: torch.dtype) -> Tensor | None:
        """[b, 1 or H, n, L]: what may be seen, and the bias by distance."""
        if self.biases is None:
            return group.bias(None, dtype)
        layer = layer if len(self.biases) > 1 else 0
        if (i, layer) not in self._masks:
            table = self.biases[layer].to(dtype)
            distance = group.query_positions[:, :, None] - group.key_positions[:, None, :]
            bias = table[distance.clamp_(0, len(table) - 1)].permute(0, 3, 1, 2)  # [b, H, n, L]
            unseen = group.bias(None, dtype)
            self._masks[i, layer] = bias if unseen is None else bias + unseen
        return self._masks[i, layer]

    @cached_property
    def _sources(self) -> list[tuple[Tensor, Tensor | None]]:
        """For every group the slots [b, S] of its requests' sources, and a mask [b, 1, 1, S] where lengths differ."""
        found = []
        device = self.window.device
        for group in self.window.groups:
            places = [self.places[i] for i in group.members]
            longest = max(place.length for place in places)
            slots = torch.zeros(len(places), longest, dtype=torch.int64)
            mask = torch.zeros(len(places), 1, 1, longest, dtype=torch.promote_types(self.dtype, torch.bfloat16))
            for row, place in enumerate(places):
                slots[row, : place.length] = place.slots()
                mask[row, :, :, place.length :] = -torch.inf
            is_ragged = any(place.length < longest for place in places)
            found.append((slots.to(device), mask.to(device) if is_ragged else None))
        return found


def _gather(held: Tensor, slots: Tensor | slice) -> Tensor:
    """[b, L, H, D]: a view where the slots are contiguous."""
    if isinstance(slots, slice):
        return held[slots][None]
    return held.index_select(0, slots.flatten()).view(*slots.shape, *held.shape[1:])


def _scattered(out: Tensor | None, rows: Tensor, group: Group, total: int) -> Tensor:
    """The rows of one group at their places in the packed window."""
    assert group.rows is not None
    if out is None:
        out = rows.new_empty(total, rows.shape[-1])
    out[group.rows.flatten()] = rows
    return out
