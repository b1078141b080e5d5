"""Inputs of a recorded pass: named lists at fixed addresses of one block, copied to the device in one transfer."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from foredraft.kernels.gpu.rows import ALIGNMENT, make_staging

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape, and dtype of 4 or 8 bytes


@dataclass(frozen=True)
class StagingBlock:
    """One block on the host and one on the device, with a view of each list in both."""

    host: Mapping[str, Tensor]  # written by the caller before `upload`
    device: Mapping[str, Tensor]  # read by the recorded pass
    host_block: Tensor
    device_block: Tensor

    @classmethod
    def make(cls, fields: Fields, device: torch.device) -> "StagingBlock":
        """Make a block of zeros with these lists; on CUDA the host's side is pinned."""
        words = [prod(shape) * dtype.itemsize // 4 for shape, dtype in fields.values()]
        ends = list(accumulate(-(-count // ALIGNMENT) * ALIGNMENT for count in words))
        host = make_staging(ends[-1], device)
        there = torch.zeros(ends[-1], dtype=torch.int32, device=device)

        def view(block: Tensor) -> dict[str, Tensor]:
            return {
                name: block[begin : begin + count].view(dtype).view(shape)
                for (name, (shape, dtype)), begin, count in zip(fields.items(), [0, *ends], words, strict=False)
            }

        return cls(view(host), view(there), host, there)

    def upload(self) -> None:
        """Copy the lists to the device. The next call must follow a wait for the work that reads them."""
        self.device_block.copy_(self.host_block, non_blocking=True)
