"""KV pool of rank 0, whose moves all ranks make."""

from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from foredraft.errors import TargetLostError
from foredraft.kv.pool import KVPool
from foredraft.tensor_parallel.group import RankGroup
from foredraft.tensor_parallel.messages import ClearPool, MoveSlots, PoolKey


@dataclass
class ParallelKVPool(KVPool):
    """KV pool of one rank's heads. The pools of the other ranks hold the other heads at the same slots."""

    group: RankGroup = field(kw_only=True)
    index: int = field(init=False)

    def __post_init__(self) -> None:
        self.index = self.group.add_pool()
        self.group.drop_pool_with(self, self.index)

    @property
    def key(self) -> PoolKey:
        """Name of this pool in messages."""
        return PoolKey(self.index, self.capacity)

    def make_empty(self) -> "ParallelKVPool":
        """Return a new pool on every rank."""
        return ParallelKVPool(kernels=self.kernels, is_whole=self.is_whole, group=self.group)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to other slots in every layer of every rank."""
        self.group.send(MoveSlots.from_tensors(self.key, sources, targets))
        super().move(sources, targets)

    def clear(self) -> None:
        """Free all tensors of every rank; the content is lost."""
        with suppress(TargetLostError):  # nothing is left to clear there, and recovery after the loss must go on
            self.group.send(ClearPool(self.key))
        super().clear()
