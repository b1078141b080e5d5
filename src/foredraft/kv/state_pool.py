"""Pool of recurrent states: tensors by state id, beside the KV pool of the same model."""

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kv.state_table import NULL_STATE, StateTable

CONV, RECURRENT = "conv", "recurrent"  # kinds of states: last inputs of a short convolution, state of a recurrence


class StateKey(NamedTuple):
    """One state tensor of a layer."""

    layer: int
    kind: str
    part: int  # a layer may have several states of one kind


class StateShape(NamedTuple):
    """Shape of one state tensor, without the dimension of the state ids."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one state."""
        return math.prod(self.size) * self.dtype.itemsize


@dataclass
class StatePool:
    """States of one model: for each tensor of each recurrent layer one row per state id.

    The tensors grow with the ids in use. Row 0 is the null state of zeros.
    """

    shapes: Mapping[StateKey, StateShape]
    device: torch.device
    # Whether the layers compute several tokens from any state in one call; otherwise only from the null state.
    continues_chunks: bool = True
    capacity: int | None = None  # states for which the tensors grow in advance; None = unlimited
    max_page_ends: int = 64  # states after page ends that the prefix cache may keep, those of running requests aside
    tensors: dict[StateKey, Tensor] = field(default_factory=dict)  # [S, *size]
    _addresses: "tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p]] | None" = None
    _table: StateTable | None = None

    def make_empty(self) -> "StatePool":
        """Return a new pool for states of the same shapes."""
        return StatePool(self.shapes, self.device, self.continues_chunks)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state over all layers."""
        return sum(shape.num_bytes for shape in self.shapes.values())

    def get_table(self, page_size: int) -> StateTable:
        """Return the table of states. The first call sets the size of its pages."""
        if self._table is None:
            self._table = StateTable(page_size)
        assert self._table.page_size == page_size, "one pool serves pages of one size"
        return self._table

    def drop_page(self, page: int) -> None:
        """Free all states of a page."""
        if self._table is not None:
            self._table.drop_page(page)

    def reserve(self, num_ids: int) -> None:
        """Grow every tensor to `num_ids` states. Raises ForedraftError if the device has too little memory."""
        for key, shape in self.shapes.items():
            old = self.tensors.get(key)
            if old is None or len(old) < num_ids:
                self.tensors[key] = self._grow(old, shape, self._choose_size(num_ids))
                self._addresses = None

    def list_addresses(self, num_layers: int) -> tuple[int, int]:
        """Return the addresses of two arrays [num_layers], valid until the pool grows.

        They hold the address of every layer's first tensor of convolution states, and of its first tensor of recurrent
        states; NULL if it has none.
        """
        if self._addresses is None:
            conv, recurrent = (
                (ctypes.c_void_p * num_layers)(*(self._find_address(layer, kind) for layer in range(num_layers)))
                for kind in (CONV, RECURRENT)
            )
            self._addresses = conv, recurrent
        conv, recurrent = self._addresses
        return ctypes.addressof(conv), ctypes.addressof(recurrent)

    def _find_address(self, layer: int, kind: str) -> int | None:
        tensor = self.tensors.get(StateKey(layer, kind, 0))
        return None if tensor is None else tensor.data_ptr()

    def read(self, key: StateKey, states: Tensor) -> Tensor:
        """Return a copy [n, *size] of the states with these ids."""
        return self.tensors[key].index_select(0, states)

    def write(self, key: StateKey, states: Tensor, values: Tensor) -> None:
        """Store values [n, *size] under these ids."""
        self.tensors[key].index_copy_(0, states, values.to(self.tensors[key].dtype))

    def clear(self) -> None:
        """Free all states and tensors."""
        self.tensors.clear()
        self._addresses = None
        if self._table is not None:
            self._table.clear()

    def check_null_state(self) -> None:
        """Assert that the null state was never written."""
        for key, tensor in self.tensors.items():
            assert not tensor[NULL_STATE].any(), f"the null state of layer {key.layer} was written"

    def _choose_size(self, num_ids: int) -> int:
        size = 1 << (num_ids - 1).bit_length()  # doubling keeps the copies a constant share of the writes
        return size if self.capacity is None else max(min(size, self.capacity), num_ids)

    def _grow(self, old: Tensor | None, shape: StateShape, num_ids: int) -> Tensor:
        try:
            grown = torch.zeros((num_ids, *shape.size), dtype=shape.dtype, device=self.device)
        except torch.OutOfMemoryError:
            raise ForedraftError(
                f"{num_ids} recurrent states of {self.bytes_per_state / 2**20:.1f} MiB do not fit on {self.device}; "
                "give a smaller max_batch (--max-batch) or shorter drafts"
            ) from None
        if old is not None:
            grown[: len(old)] = old
        return grown
