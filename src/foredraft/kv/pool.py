"""KV pools: keys and values by slot. A pool holds the KV of one model; all pools share the allocator's page ids."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.arena import allocate_zeros
from foredraft.kernels.gpu.graphs import GraphMemory, Recorder, make_recorder
from foredraft.kernels.gpu.loading import GPUKernels, select_kernels
from foredraft.kv.allocator import NULL_PAGE
from foredraft.kv.state_pool import StatePool

LayerAddresses: TypeAlias = tuple["ctypes.Array[ctypes.c_void_p]", "ctypes.Array[ctypes.c_void_p]"]


@dataclass
class KVPool:
    """Keys and values of one model: one row per slot in the tensors of every layer.

    Tensors [S, H, D] (S slots, H heads, D head size) are created by the first write of a layer. They grow with the
    slots in use, or have the whole capacity at once: growth moves addresses, and needs memory for the old and the new
    tensors together. Rows start as zeros: padding reads the null page, and a NaN there would spread even through a
    mask.
    """

    is_native: bool = False  # allocate for native kernels
    capacity: int | None = None  # upper limit on slots; None = unlimited
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer -> (keys, values), each [S, H, D]
    kernels: GPUKernels | None = None  # store, attend and move; None = native kernels or torch's operators
    is_whole: bool = False  # allocate all of `capacity` at once, if it is set
    recorder: Recorder | None = None  # records passes over this pool; None = every launch is made anew
    graph_memory: GraphMemory | None = None  # for the recordings; None = no pass is recorded
    layout_version: int = 0  # changes with the addresses of the tensors
    states: StatePool | None = None  # of recurrent layers; None = the model has none
    _layer_addresses: "LayerAddresses | None" = None  # cached `addresses`; None after a layer has grown
    _pointer_table: Any = None  # of all layers, for `kernels.move`; None after a layer has grown
    _reserved: tuple[int, int] = (0, 0)  # first layers, and slots that each of them has; (0, 0) after one has grown

    @classmethod
    def for_device(cls, device: torch.device, is_native: bool = False, states: StatePool | None = None) -> "KVPool":
        """Return an empty pool for a device. On CUDA its KV is allocated whole."""
        kernels = select_kernels(device)
        # passes with recurrent states are planned on the host
        recorder = None if kernels is None or states is not None else make_recorder(device)
        return cls(is_native, kernels=kernels, is_whole=device.type == "cuda", recorder=recorder, states=states)

    def make_empty(self) -> "KVPool":
        """Return a new pool for the same kernels and the same kind of allocation."""
        states = None if self.states is None else self.states.make_empty()
        return KVPool(
            self.is_native, kernels=self.kernels, is_whole=self.is_whole, recorder=self.recorder, states=states
        )

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        """Store keys and values of one layer.

        Args:
            layer: index of the layer.
            slots: [T] target slots, all below num_slots.
            keys: [T, H, D].
            values: [T, H, D].
            num_slots: slots that the layer must have after the call.

        Returns:
            All keys and values of the layer, each [S, H, D].
        """
        tensors = self.layers.get(layer)
        if tensors is None or len(tensors[0]) < num_slots:
            tensors = self.layers[layer] = (
                self._grow_layer(tensors and tensors[0], keys, num_slots),
                self._grow_layer(tensors and tensors[1], values, num_slots),
            )
        if self.kernels is not None:
            self.kernels.store(keys, values, slots, *tensors)
        else:
            tensors[0].index_copy_(0, slots, keys)
            tensors[1].index_copy_(0, slots, values)
        return tensors

    def reserve(self, like: Sequence[Tensor], num_slots: int) -> None:
        """Grow every layer to num_slots; like[i] is an empty tensor [0, H, D] like the keys and values of layer i."""
        if len(like) <= self._reserved[0] and num_slots <= self._reserved[1]:
            return  # reading the sizes of all tensors takes longer
        for layer, sample in enumerate(like):
            tensors = self.layers.get(layer)
            if tensors is None or len(tensors[0]) < num_slots:
                keys, values = tensors or (None, None)
                self.layers[layer] = (
                    self._grow_layer(keys, sample, num_slots),
                    self._grow_layer(values, sample, num_slots),
                )
        self._reserved = (len(like), num_slots)

    @property
    def state_pools(self) -> tuple[StatePool, ...]:
        """Pools of the recurrent states that live on the pages of this pool."""
        return () if self.states is None else (self.states,)

    def drop_states(self, page: int) -> None:
        """Free the recurrent states of a page that became free."""
        for states in self.state_pools:
            states.drop_page(page)

    def find_valid_start(self, pages: Sequence[int], length: int, page_size: int) -> int:
        """Return after how many tokens a pass may begin, at most `length`, all of which have KV.

        A recurrent layer can only begin after a token that has a state.
        """
        return length if self.states is None else self.states.get_table(page_size).find_last_valid(pages, length)

    def clear(self) -> None:
        """Free all tensors; the content is lost."""
        self.layers.clear()
        if self.states is not None:
            self.states.clear()
        self._forget_addresses()

    @property
    def addresses(self) -> LayerAddresses:
        """Addresses of the keys and of the values of every layer, for native code."""
        if self._layer_addresses is None:
            layers = [self.layers[layer] for layer in range(len(self.layers))]
            array = ctypes.c_void_p * len(layers)
            self._layer_addresses = array(*(k.data_ptr() for k, _ in layers)), array(*(v.data_ptr() for _, v in layers))
        return self._layer_addresses

    def _grow_layer(self, old: Tensor | None, like: Tensor, num_slots: int) -> Tensor:
        self._forget_addresses()
        shape = (self._choose_size(num_slots), *like.shape[1:])
        grown = allocate_zeros(shape, like.dtype) if self.is_native else _allocate(like, shape)
        if old is not None:
            grown[: len(old)] = old
        return grown

    def _forget_addresses(self) -> None:
        self._layer_addresses = self._pointer_table = None
        self._reserved = (0, 0)
        self.layout_version += 1

    def _choose_size(self, num_slots: int) -> int:
        size = 1 << (num_slots - 1).bit_length()  # doubling keeps the copies a constant share of the writes
        if self.capacity is None:
            return size
        return max(self.capacity if self.is_whole else min(size, self.capacity), num_slots)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to other slots in every layer, all reads before any write."""
        if self.kernels is not None and len(sources) <= self.kernels.max_moves:
            if self._pointer_table is None:
                self._pointer_table = self.kernels.make_pointer_table(
                    [x for pair in self.layers.values() for x in pair]
                )
            self.kernels.move(self._pointer_table, sources, targets)
            return
        for keys, values in self.layers.values():
            keys.index_copy_(0, targets, keys.index_select(0, sources))
            values.index_copy_(0, targets, values.index_select(0, sources))

    def check_null_page(self, page_size: int) -> None:
        """Assert that the null page was never written."""
        null = slice(NULL_PAGE * page_size, (NULL_PAGE + 1) * page_size)
        for layer, (keys, values) in self.layers.items():
            assert not keys[null].any(), f"keys of layer {layer} were written to the null page"
            assert not values[null].any(), f"values of layer {layer} were written to the null page"


def _allocate(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros of a shape. Raises ForedraftError if the device has too little memory."""
    try:
        return like.new_zeros(shape)
    except torch.OutOfMemoryError:
        raise ForedraftError(
            f"the keys or values of one layer need {math.prod(shape) * like.element_size() / 2**20:.0f} MiB for "
            f"{shape[0]} tokens, and {like.device} has no room for them; give a smaller kv_memory (--kv-memory)"
        ) from None


def plan_moves(
    paths: list[list[int]], starts: list[int], pages: list[list[int]], page_size: int
) -> tuple[list[int], list[int]]:
    """Return (source slots, target slots) that move accepted paths to the front of the slots of their step.

    Node n of request b was written at position starts[b] + n, and path[i] moves to starts[b] + i. The path of a chain
    is 0, 1, 2 and so on, so nothing moves.

    Args:
        paths: B accepted paths of nodes.
        starts: B positions of node 0.
        pages: B block tables.
        page_size: tokens per page.
    """
    sources: list[int] = []
    targets: list[int] = []
    for path, start, table in zip(paths, starts, pages, strict=True):
        for i, node in enumerate(path):
            if i != node:
                sources.append(get_slot(table, start + node, page_size))
                targets.append(get_slot(table, start + i, page_size))
    return sources, targets


def get_slot(pages: list[int], position: int, page_size: int) -> int:
    """Return the slot of a position of a request, given its block table."""
    return pages[position // page_size] * page_size + position % page_size


def compact_accepted(
    pool: KVPool,
    paths: list[list[int]],
    starts: list[int],
    pages: list[list[int]],
    page_size: int,
    device: torch.device,
) -> None:
    """Move the KV entries of accepted paths to the front of their step; arguments as in `plan_moves`.

    Of the states of recurrent layers, the last one of each path stays.
    """
    sources, targets = plan_moves(paths, starts, pages, page_size)
    if sources:
        pool.move(*torch.tensor([sources, targets]).to(device))  # one transfer
    if pool.states is not None:
        table = pool.states.get_table(page_size)
        for path, start, block_table in zip(paths, starts, pages, strict=True):
            table.commit(block_table, start, path)
