"""The part of a model in one process: its modules, KV pools and shortened copies."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hf import HFModel
from foredraft.models.truncated_modules import Adapter

WHOLE_MODEL = -1  # exit index of a pass through all layers
Exit = tuple[int, Adapter | None]  # number of layers, and the adapter after them


@dataclass
class Shard:
    """Part of a model. Rank 0 decides everything; the others run its messages on a Shard."""

    lm: HFModel
    _pools: dict[int, KVPool] = field(default_factory=dict)
    _exits: dict[int, Exit] = field(default_factory=dict)
    # [exit index, pool] -> pass through the first layers
    _passes: dict[tuple[int, int], Callable[[ForwardBatch], Tensor]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.lm.device

    def get_pool(self, index: int) -> KVPool:
        """Return the KV pool of an engine; a new one at first."""
        return self._pools.setdefault(index, self.lm.pool.make_empty())

    def drop_pool(self, index: int) -> None:
        """Forget a pool and the passes that write to it."""
        self._pools.pop(index, None)
        self._passes = {key: run for key, run in self._passes.items() if key[1] != index}

    def run_pass(self, batch: ForwardBatch, pool_index: int, capacity: int | None, exit_index: int) -> None:
        """Run one forward pass and drop its logits, which every rank has.

        Args:
            batch: packed rows.
            pool_index: KV pool.
            capacity: upper limit on the slots of the pool; None = unlimited.
            exit_index: pass through the first layers, or WHOLE_MODEL.
        """
        pool = self.get_pool(pool_index)
        pool.capacity = capacity
        lm = replace(self.lm, pool=pool)
        if exit_index == WHOLE_MODEL:
            lm.forward(batch)
            return
        key = (exit_index, pool_index)
        if key not in self._passes:
            self._passes[key] = lm.truncate_modules(*self._exits[exit_index])
        self._passes[key](batch)

    def add_exit(self, index: int, num_layers: int, sizes: tuple[int, int, float] | None) -> None:
        """Prepare passes through the first layers; `sizes` of an adapter whose weights rank 0 broadcasts, or None."""
        adapter = None if sizes is None else Adapter(*sizes).to(self.device, self.lm.model.dtype)
        if adapter is not None:
            broadcast_weights(adapter)
        self._exits[index] = (num_layers, adapter)

    def gather(self, name: str) -> Tensor:
        """Return a whole parameter of the model. All ranks call this together."""
        return gather_parameter(self.lm.model.get_parameter(name))


def broadcast_weights(adapter: Adapter) -> None:
    """Replace the weights of an adapter by those of rank 0. All ranks call this together."""
    for parameter in adapter.parameters():
        dist.broadcast(parameter.data, 0)


def gather_parameter(parameter: Tensor) -> Tensor:
    """Return a whole parameter, of which each rank holds a part. All ranks call this together."""
    with torch.no_grad():
        return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()
