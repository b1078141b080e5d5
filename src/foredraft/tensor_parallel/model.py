"""A target whose layers are split over several processes, behind the interface of every other target."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.hf import HFModel
from foredraft.models.truncated_modules import Adapter
from foredraft.tensor_parallel.group import RankGroup
from foredraft.tensor_parallel.messages import RunPass
from foredraft.tensor_parallel.pool import ParallelKVPool


@dataclass
class ParallelLM(HFModel):
    """Target split over the ranks of a group.

    This process is rank 0. It runs engine, drafter and verification, and decides alone. Hidden states and logits are
    the same on every rank, so a head reads those of this one.
    """

    pool: ParallelKVPool
    group: RankGroup = field(kw_only=True)

    @classmethod
    def from_part(cls, part: HFModel, group: RankGroup) -> "ParallelLM":
        """Make the target from the loaded part of rank 0."""
        local = part.pool
        pool = ParallelKVPool(kernels=local.kernels, is_whole=local.is_whole, group=group)
        return cls(part.model, part.name, pool, part.kv_elements_per_token, part.num_parameters, group=group)

    def with_new_kv(self) -> "ParallelLM":
        """Return a copy with the same weights and a new KV pool on every rank."""
        return replace(self, pool=self.pool.make_empty())

    def close(self) -> None:
        """End the other processes, unless a copy with other KV uses them."""
        self.group.close_pool(self.pool.index)

    @property
    def adapter_obstacle(self) -> str | None:
        """Reason why requests cannot have adapters of their own."""
        return "it is split over several processes (tensor_parallel_size)"

    @property
    def embedding(self) -> Tensor:
        """Input embedding matrix [V, H], unscaled; collected from all ranks at first use."""
        return self.group.gather(self.model, self.model.get_input_embeddings().weight)

    @property
    def head_weight(self) -> Tensor:
        """Matrix [V, H] of the head; collected from all ranks at first use."""
        return self.group.gather(self.model, self.model.get_output_embeddings().weight)

    @property
    def has_whole_kv(self) -> bool:
        """False: every rank holds the keys and values of its own heads."""
        return False

    def bytes_per_token(self) -> int:
        """Return the KV bytes of one token on the device of this process, which the ranks share on CPU."""
        return super().bytes_per_token() * (self.group.size if self.device.type == "cpu" else 1)

    def forward(self, forward_batch: ForwardBatch, hidden_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Run one forward pass on all ranks; see HFModel.forward.

        Raises:
            TargetLostError: a process has failed.
        """
        self.check_boundaries(hidden_layers)
        with self.group.run_together(RunPass.from_batch(forward_batch, self.pool.key)), torch.no_grad():
            return super().forward(forward_batch, hidden_layers)

    def truncate_modules(self, num_layers: int, adapter: Adapter | None) -> Callable[[ForwardBatch], Tensor]:
        """Make the pass of all ranks through the first layers; see HFModel.truncate_modules."""
        run = super().truncate_modules(num_layers, adapter)
        exit_index = self.group.add_exit(num_layers, adapter)

        def run_together(batch: ForwardBatch) -> Tensor:
            with self.group.run_together(RunPass.from_batch(batch, self.pool.key, exit_index)), torch.no_grad():
                return run(batch)

        return run_together

    @property
    def head_bias(self) -> Tensor | None:
        bias = self.model.get_output_embeddings().bias
        return None if bias is None else self.group.gather(self.model, bias)

    def _apply_head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight, self.head_bias)
