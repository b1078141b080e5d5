"""Device, precision and processes of a training run."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ForedraftError, format_install_command

PRECISIONS = ("auto", "bf16", "fp32")


@dataclass(frozen=True)
class DistributedContext:
    """One process of a run; `accelerate launch` makes several, each on a device and with a share of every batch."""

    device: torch.device
    rank: int = 0
    num_processes: int = 1
    is_mixed: bool = False  # matrix products in bfloat16; weights, gradients and updates stay float32

    @classmethod
    def detect(cls, device: str, precision: str) -> "DistributedContext":
        """Raises ForedraftError without accelerate, and for words it does not know."""
        if precision not in PRECISIONS:
            raise ForedraftError(f"unknown precision {precision!r}; use one of {', '.join(PRECISIONS)}")
        try:
            from accelerate import PartialState
        except ImportError:
            raise ForedraftError(f"training needs accelerate: {format_install_command('train')}") from None
        from foredraft.models.loading import parse_device

        wanted = parse_device(device)
        state = PartialState(cpu=wanted.type == "cpu")
        found = state.device if state.num_processes > 1 or wanted.index is None else wanted
        found = torch.device("cpu") if found.type == "cpu" else found  # a numbered one is not equal to it
        is_mixed = precision == "bf16" or (precision == "auto" and _has_bfloat16(found))
        return cls(found, state.process_index, state.num_processes, is_mixed)

    @property
    def is_main(self) -> bool:
        """It alone writes and speaks."""
        return self.rank == 0

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.is_mixed:
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def all_reduce(self, tensor: Tensor) -> None:
        """Make a tensor the sum over all processes, in place."""
        if self.num_processes > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Make tensors those of the first process, in place."""
        if self.num_processes > 1:
            import torch.distributed as dist

            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def reduce_any(self, flag: bool) -> bool:
        """Whether it holds in some process."""
        if self.num_processes == 1:
            return flag
        value = torch.tensor(float(flag), device=self.device)
        self.all_reduce(value)
        return bool(value > 0)

    def wait(self) -> None:
        """Until every process is here."""
        self.reduce_any(False)


def _has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 faster than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported())
