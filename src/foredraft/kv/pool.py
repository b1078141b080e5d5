"""Keys and values by slot. A pool holds one model's KV; every pool shares the allocator's page ids."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from foredraft.kernels.arena import zeros
from foredraft.kv.blocks import NULL_PAGE

Places: TypeAlias = tuple["ctypes.Array[ctypes.c_void_p]", "ctypes.Array[ctypes.c_void_p]"]


@dataclass
class KVPool:
    """One row per slot and layer. A layer's tensors appear with its first write and grow with the slots in use.

    Rows start as zeros: padding reads the null page, and a masked NaN would still poison a sum.
    """

    is_native: bool = False  # read by native kernels where they can
    capacity: int | None = None  # slots it may ever need: growth ends there
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> [S, H, D] keys, values
    _places: "Places | None" = None  # of the layers as they are now

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        """Store [T, H, D] keys and values at [T] slots below num_slots; returns the layer's whole [S, H, D] tensors."""
        held = self.layers.get(layer)
        if held is None or len(held[0]) < num_slots:
            held = self.layers[layer] = (
                self._grown(held and held[0], keys, num_slots),
                self._grown(held and held[1], values, num_slots),
            )
        held[0].index_copy_(0, slots, keys)
        held[1].index_copy_(0, slots, values)
        return held

    def reserve(self, like: Sequence[Tensor], num_slots: int) -> None:
        """Make room in every layer at once; like[i] is an empty tensor [0, H, D] of the keys and values of layer i."""
        for layer, sample in enumerate(like):
            held = self.layers.get(layer)
            if held is None or len(held[0]) < num_slots:
                keys, values = held or (None, None)
                self.layers[layer] = self._grown(keys, sample, num_slots), self._grown(values, sample, num_slots)

    def clear(self) -> None:
        """Give the memory back: whatever was written is lost, and the first write begins anew."""
        self.layers.clear()
        self._places = None

    @property
    def addresses(self) -> Places:
        """Where the keys and the values of every layer lie, for native code."""
        if self._places is None:
            held = [self.layers[layer] for layer in range(len(self.layers))]
            places = ctypes.c_void_p * len(held)
            self._places = places(*(k.data_ptr() for k, _ in held)), places(*(v.data_ptr() for _, v in held))
        return self._places

    def _grown(self, old: Tensor | None, like: Tensor, num_slots: int) -> Tensor:
        self._places = None
        size = 1 << (num_slots - 1).bit_length()  # doubling: copies stay a constant share of the writes
        if self.capacity is not None:
            size = max(min(size, self.capacity), num_slots)
        shape = (size, *like.shape[1:])
        grown = zeros(shape, like.dtype) if self.is_native else like.new_zeros(shape)
        if old is not None:
            grown[: len(old)] = old
        return grown

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots onto slots, all reads before any write."""
        for keys, values in self.layers.values():
            keys.index_copy_(0, targets, keys.index_select(0, sources))
            values.index_copy_(0, targets, values.index_select(0, sources))

    def check_null_page(self, page_size: int) -> None:
        """Assert that nothing was ever written where padding points."""
        null = slice(NULL_PAGE * page_size, (NULL_PAGE + 1) * page_size)
        for layer, (keys, values) in self.layers.items():
            assert not keys[null].any(), f"keys of layer {layer} were written to the null page"
            assert not values[null].any(), f"values of layer {layer} were written to the null page"


def moves(
    paths: list[list[int]], starts: list[int], pages: list[list[int]], page_size: int
) -> tuple[list[int], list[int]]:
    """(source slots, target slots) that bring accepted paths to the front of the slots of their step.

    Node n of a request was written to position starts[b] + n. A chain's path is 0, 1, 2, ... and moves nothing.
    """
    sources: list[int] = []
    targets: list[int] = []
    for path, start, table in zip(paths, starts, pages, strict=True):
        for i, node in enumerate(path):
            if i != node:
                sources.append(slot(table, start + node, page_size))
                targets.append(slot(table, start + i, page_size))
    return sources, targets


def slot(pages: list[int], position: int, page_size: int) -> int:
    """The row of a pool that holds a request's position."""
    return pages[position // page_size] * page_size + position % page_size


def keep(
    pool: KVPool,
    paths: list[list[int]],
    starts: list[int],
    pages: list[list[int]],
    page_size: int,
    device: torch.device,
) -> None:
    """Compact the accepted paths of a step: a chain moves nothing, a tree moves its path to the front."""
    sources, targets = moves(paths, starts, pages, page_size)
    if sources:
        pool.move(torch.tensor(sources, device=device), torch.tensor(targets, device=device))
