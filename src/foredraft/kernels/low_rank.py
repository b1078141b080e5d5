"""Changes of the products of a native pass by LoRA adapters, y += B (A x): native layout and slow reference.

The rows of a pass that have an adapter are sorted by it, so that A is one product for each adapter. B is applied where
the product of the layer is stored. Both are chains of additions whose order does not depend on the other rows.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.records import PRODUCTS, AdaptedRecord, LayerChangeRecord, LowRankRecord, WeightRecord
from foredraft.kernels.linear import PANEL, PackedWeight, linear_reference

OUTPUT_BLOCK = 16  # outputs that share the columns of A x which they read
MAX_GROUP = 32  # rows of one product with A, so that threads share a long prompt
LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class LowRank:
    """Change of one product by an adapter, y += B (A x)."""

    a: PackedWeight  # [rank, k]
    b: Tensor  # [sum of the blocks' widths, 16] float32, with the adapter's scale
    tables: Tensor  # [3, blocks] int32: first column of A x, number of columns, offset in b

    @classmethod
    def pack(cls, a: Tensor, b: Tensor, arena: Arena) -> "LowRank":
        """Pack A [rank, k], bfloat16 or float32, and B [n, rank] with the adapter's scale.

        Zeros of B at the edges of a block are not stored: layers that are one product have blocks of their own.
        """
        n, rank = b.shape
        rows = torch.cat([b.float(), b.new_zeros(-n % PANEL, rank, dtype=torch.float32)]).view(-1, OUTPUT_BLOCK, rank)
        used, columns = (rows != 0).any(1), torch.arange(rank)
        first = torch.where(used, columns, rank).amin(1)
        last = torch.where(used, columns + 1, 0).amax(1)
        width = (last - first).clamp_min(0)
        first = torch.where(width > 0, first, 0)
        kept = (columns >= first[:, None]) & (columns < (first + width)[:, None])
        factors = rows.transpose(1, 2)[kept]
        offset = (width.cumsum(0) - width) * OUTPUT_BLOCK
        tables = torch.stack([first, width, offset]).to(torch.int32)
        return cls(PackedWeight.pack(a, None, arena), arena.copy(factors.contiguous()), tables)

    def compute_reference(self, x: Tensor) -> Tensor:
        """Compute the change [T, n of whole panels] of x [T, k] in plain torch, float32 with sums in float64."""
        inner = linear_reference(x, self.a).double()
        blocks = []
        for first, width, offset in self.tables.T.tolist():
            factors = self.b[offset // OUTPUT_BLOCK : offset // OUTPUT_BLOCK + width].double()
            blocks.append(inner[:, first : first + width] @ factors)
        return torch.cat(blocks, 1).float()

    @property
    def record(self) -> LowRankRecord:
        """Record for the native code; valid as long as this object lives."""
        return LowRankRecord(self.a.record, self.b.data_ptr(), *(table.data_ptr() for table in self.tables))


LayerLowRanks = dict[str, LowRank]  # by name of the product; those that are missing do not change


@dataclass(frozen=True, eq=False)  # compared by identity
class LowRankLayers:
    """Changes of all layers of a model by one adapter."""

    layers: Any  # array of LayerChangeRecord
    kept: Sequence[LayerLowRanks]  # keeps the memory alive to which the records point
    rank: int  # most rows of a matrix A
    input_bytes: int  # most bytes of an input of A
    products: int  # bit p: product p of some layer changes

    @classmethod
    def build(cls, layers: Sequence[LayerLowRanks], widths: Sequence[dict[str, int]], kind: int) -> "LowRankLayers":
        """Build the records.

        Args:
            layers: changes, by layer.
            widths: inputs k of every product, by layer and name.
            kind: format of the matrices A, as in DTYPE_KINDS.
        """
        records = (LayerChangeRecord * len(layers))(
            *(
                LayerChangeRecord(
                    tuple(
                        changes[name].record
                        if name in changes
                        else LowRankRecord(WeightRecord(n=0, k=sizes.get(name, 0), kind=kind))
                        for name in PRODUCTS
                    )
                )
                for changes, sizes in zip(layers, widths, strict=True)
            )
        )
        every = [change for changes in layers for change in changes.values()]
        inputs = max((size for sizes in widths for size in sizes.values()), default=0)
        products = sum(1 << bit for bit, name in enumerate(PRODUCTS) if any(name in changes for changes in layers))
        rank = max((change.a.n for change in every), default=0)
        return cls(records, tuple(layers), rank, 4 * inputs + 2 * LINE, products)

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices."""
        every = [change for changes in self.kept for change in changes.values()]
        return sum(change.a.data.nbytes + change.b.nbytes for change in every)


@dataclass(frozen=True)
class AdaptedRows:
    """Rows of a pass with adapters. `record` is valid as long as this object lives."""

    record: AdaptedRecord
    kept: tuple[Any, ...] = field(repr=False)

    @classmethod
    def pack(cls, adapters: Sequence[LowRankLayers | None], counts: Sequence[int]) -> "AdaptedRows":
        """Sort the rows of a pass by adapter.

        Args:
            adapters: of every request, at least one of them not None.
            counts: rows of every request.
        """
        rows_of: dict[LowRankLayers, list[int]] = {}
        start = 0
        for adapter, count in zip(adapters, counts, strict=True):
            if adapter is not None:
                rows_of.setdefault(adapter, []).extend(range(start, start + count))
            start += count
        place, row, group, first, change = array("i", [-1]) * start, array("i"), array("i"), array("i"), array("Q")
        for adapter, rows in rows_of.items():
            for begin in range(0, len(rows), MAX_GROUP):
                part = rows[begin : begin + MAX_GROUP]
                for i, number in enumerate(part):
                    place[number] = len(row) + i
                group.extend([len(row)] * len(part))
                first.append(len(row))
                row.extend(part)
            change.extend([ctypes.addressof(adapter.layers)] * len(rows))
        first.append(len(row))
        input_bytes = -(-max(adapter.input_bytes for adapter in rows_of) // LINE) * LINE
        rank = max(adapter.rank for adapter in rows_of)
        memory = torch.empty(len(row) * input_bytes + LINE, dtype=torch.uint8)
        inner = torch.empty(len(row) * rank, dtype=torch.float32)
        lists = (place, row, group, first, change)
        products = list(accumulate((adapter.products for adapter in rows_of), int.__or__))[-1]
        record = AdaptedRecord(
            len(row), len(first) - 1, rank, products, input_bytes,
            *(numbers.buffer_info()[0] for numbers in lists),
            -(-memory.data_ptr() // LINE) * LINE, inner.data_ptr(),
        )  # fmt: skip
        return cls(record, (*lists, memory, inner, tuple(rows_of)))
