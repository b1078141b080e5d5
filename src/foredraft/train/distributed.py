"""Device, precision and processes of a training run."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ForedraftError, format_install_command
from foredraft.train.precision import has_fast_bfloat16
from foredraft.train.sharding_settings import ShardingSettings

PRECISIONS = ("auto", "bf16", "fp32")


@dataclass(frozen=True)
class DistributedContext:
    """One process of a run.

    `accelerate launch` starts several processes, each with its own device and a share of every batch.
    """

    device: torch.device
    rank: int = 0
    num_processes: int = 1
    is_mixed: bool = False  # matrix products in bfloat16; weights, gradients and updates stay float32
    sharding: ShardingSettings | None = None  # None = every process has all weights

    @classmethod
    def detect(cls, device: str, precision: str) -> "DistributedContext":
        """Detect the processes and the device of this one.

        Args:
            device: Device as the user wrote it.
            precision: One of PRECISIONS.

        Raises:
            ForedraftError: if accelerate is missing, a value is unknown, or the launcher asks for a kind of sharding
                that is not supported.
        """
        if precision not in PRECISIONS:
            raise ForedraftError(f"unknown precision {precision!r}; use one of {', '.join(PRECISIONS)}")
        try:
            from accelerate import PartialState
        except ImportError:
            raise ForedraftError(f"training needs accelerate: {format_install_command('train')}") from None
        from foredraft.models.loading import parse_device

        requested = parse_device(device)
        state = PartialState(cpu=requested.type == "cpu")
        selected = state.device if state.num_processes > 1 or requested.index is None else requested
        # torch.device("cpu:0") is not equal to torch.device("cpu").
        selected = torch.device("cpu") if selected.type == "cpu" else selected
        is_mixed = precision == "bf16" or (precision == "auto" and has_fast_bfloat16(selected))
        sharding = ShardingSettings.detect(state.num_processes)
        return cls(selected, state.process_index, state.num_processes, is_mixed, sharding)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages; exactly one does."""
        return self.rank == 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.is_mixed:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes, in place."""
        if self.num_processes > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of the first process, in place."""
        if self.num_processes > 1:
            import torch.distributed as dist

            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def share_number(self, value: int) -> int:
        """Return the number of the first process."""
        number = torch.tensor(value, device=self.device)
        self.broadcast([number])
        return int(number)

    def reduce_any(self, flag: bool) -> bool:
        """Check whether a flag is set in any process."""
        if self.num_processes == 1:
            return flag
        value = torch.tensor(float(flag), device=self.device)
        self.all_reduce(value)
        return bool(value > 0)

    def wait(self) -> None:
        """Block until every process has called this method."""
        self.reduce_any(False)


def close_processes() -> None:
    """End the connections of this process to the others, if it has any.

    A program calls it before it exits: threads of connections that are open then may abort the process.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        from foredraft.tensor_parallel.process_group import release_groups_of_meshes

        dist.destroy_process_group()
        release_groups_of_meshes()
