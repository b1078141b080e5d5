"""Messages of rank 0 to the other ranks: what each does with its part of the model, in the order of arrival.

A message carries plain numbers. Tensors travel by collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.tensor_parallel.shard import WHOLE_MODEL, Shard


class Message(Protocol):
    """Something that every rank but the first does."""

    def run(self, shard: Shard) -> None: ...


@dataclass(frozen=True)
class PoolKey:
    """KV pool of one engine."""

    index: int
    capacity: int | None  # upper limit on slots; None = unlimited


@dataclass(frozen=True)
class RunPass:
    """Run one forward pass and write its KV."""

    pool: PoolKey
    spans: tuple[Span, ...]
    logit_rows: Sequence[int]
    page_size: int
    exit_index: int = WHOLE_MODEL  # of AddExit: a pass through the first layers

    @classmethod
    def from_batch(cls, batch: ForwardBatch, pool: PoolKey, exit_index: int = WHOLE_MODEL) -> "RunPass":
        return cls(pool, batch.spans, batch.logit_row_list, batch.page_size, exit_index)

    def run(self, shard: Shard) -> None:
        batch = ForwardBatch.build(self.spans, self.logit_rows, self.page_size, shard.device)
        shard.run_pass(batch, self.pool.index, self.pool.capacity, self.exit_index)


@dataclass(frozen=True)
class AddExit:
    """Prepare passes through the first layers, with an adapter of the given sizes or without one."""

    index: int
    num_layers: int
    adapter: tuple[int, int, float] | None  # width of the hidden states, rank, epsilon; its weights are broadcast

    def run(self, shard: Shard) -> None:
        shard.add_exit(self.index, self.num_layers, self.adapter)


@dataclass(frozen=True)
class MoveSlots:
    """Copy slots of a pool to other slots."""

    pool: PoolKey
    sources: list[int]
    targets: list[int]

    def run(self, shard: Shard) -> None:
        sources, targets = (torch.tensor(slots, device=shard.device) for slots in (self.sources, self.targets))
        shard.get_pool(self.pool.index).move(sources, targets)

    @classmethod
    def from_tensors(cls, pool: PoolKey, sources: Tensor, targets: Tensor) -> "MoveSlots":
        return cls(pool, sources.tolist(), targets.tolist())


@dataclass(frozen=True)
class ClearPool:
    """Free the tensors of a pool."""

    pool: PoolKey

    def run(self, shard: Shard) -> None:
        shard.get_pool(self.pool.index).clear()


@dataclass(frozen=True)
class DropPool:
    """Forget a pool whose engine is gone."""

    index: int

    def run(self, shard: Shard) -> None:
        shard.drop_pool(self.index)


@dataclass(frozen=True)
class GatherParameter:
    """Take part in the collection of a whole parameter on rank 0."""

    name: str

    def run(self, shard: Shard) -> None:
        shard.gather(self.name)
