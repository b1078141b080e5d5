"""Input of a verification on the GPU: one block of 32-bit numbers, copied in one transfer. Without triton."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class RequestNumbers(NamedTuple):
    """Numbers of one request."""

    walk: int  # TreeWalk
    first_row: int
    num_rows: int
    position: int  # of the root in the sequence
    top_k: int  # 0 = off
    is_greedy: bool
    scale: float  # of the logits, rounded to float32
    min_weight: float  # the same; 0 = off
    noise_state: int  # signed 64 bits: key of seed and sample index
    top_p: float


class RowNumbers(NamedTuple):
    """Numbers of one scored node. Nodes are counted from the root."""

    token: int
    first_child: int  # -1 = none
    next_sibling: int  # -1 = none
    num_sampled: int  # leading children that were sampled, if the row of q has any mass
    depth: int
    request: int


# Indices in the 32-bit numbers of a request. The last two fields of `RequestNumbers` take two each.
REQUEST_WIDTH, ROW_WIDTH = 12, len(RowNumbers._fields)
TABLE_SIZE = 16  # float32 numbers in front: the sixteenths of `sampling/weights.py`


@dataclass(frozen=True)
class VerifyBlock:
    """Block on the device, and the sizes that a launch needs."""

    numbers: Tensor  # int32: the table, the requests, the rows
    num_requests: int
    num_rows: int
    most_rows: int  # of a request
    walks: frozenset[int]  # of the requests

    @classmethod
    def pack(
        cls,
        table: NDArray[np.float32],
        requests: Sequence[RequestNumbers],
        rows: Sequence[RowNumbers],
        device: torch.device,
    ) -> "VerifyBlock":
        """Copy the numbers to a device.

        Args:
            table: [16] the sixteenths.
            requests: numbers of B requests.
            rows: numbers of R rows, those of one request after those of another.
            device: device of the kernels.
        """
        at = TABLE_SIZE + len(requests) * REQUEST_WIDTH
        staging = torch.empty(at + len(rows) * ROW_WIDTH, dtype=torch.int32, pin_memory=device.type == "cuda")
        numbers = staging.numpy()
        numbers[:TABLE_SIZE] = table.view(np.int32)
        own = numbers[TABLE_SIZE:at].reshape(len(requests), REQUEST_WIDTH)
        own[:, :6] = [request[:6] for request in requests]
        own[:, 6:8] = np.array([request[6:8] for request in requests], dtype=np.float32).view(np.int32)
        own[:, 8:10] = np.array([request.noise_state for request in requests], dtype=np.int64)[:, None].view(np.int32)
        own[:, 10:] = np.array([request.top_p for request in requests], dtype=np.float64)[:, None].view(np.int32)
        numbers[at:] = np.array(rows, dtype=np.int32).reshape(-1)
        most_rows = max((request.num_rows for request in requests), default=0)
        walks = frozenset(int(request.walk) for request in requests)
        return cls(staging.to(device, non_blocking=True), len(requests), len(rows), most_rows, walks)

    @property
    def requests(self) -> Tensor:
        """Numbers of the requests, [B * 12]."""
        return self.numbers[TABLE_SIZE : TABLE_SIZE + self.num_requests * REQUEST_WIDTH]

    @property
    def rows(self) -> Tensor:
        """Numbers of the rows, [R * 6]."""
        return self.numbers[TABLE_SIZE + self.num_requests * REQUEST_WIDTH :]

    @property
    def table(self) -> Tensor:
        """Sixteenths, [16] float32."""
        return self.numbers[:TABLE_SIZE].view(torch.float32)
