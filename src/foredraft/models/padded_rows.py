"""Input of a recorded pass: rows at fixed addresses, padded to the size of the recording."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.rows import DeviceRows, list_rows, make_staging
from foredraft.kv.allocator import NULL_PAGE
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.pass_size import PassSize

NO_SLOT = -1  # the store kernel skips it
# of the fields of DeviceRows
TOKENS, WRITE, TAILS, TAIL_AT, TAIL, FIRST_ROW = 0, 2, 6, 7, 9, 10


@dataclass(frozen=True)
class PaddedRows:
    """Rows of a pass at fixed addresses. `load` replaces them; the attributes are those of a ForwardBatch.

    The rows of padding are the last request. Their keys and values are written nowhere, and each of them reads one key,
    that of the null page. Further requests are empty.
    """

    size: PassSize
    device_rows: DeviceRows
    num_slots: int  # slots of the pool
    _block: Tensor  # int32, which `device_rows` is a view of

    @classmethod
    def allocate(cls, size: PassSize, num_slots: int, device: torch.device | str) -> "PaddedRows":
        """Allocate the rows of a size on a device."""
        block = torch.zeros(size.layout.num_numbers, dtype=torch.int32, device=device)
        views: Any = size.layout.split(block)
        sizes: Any = size.rows, size.requests + 1, size.keys, size.page_size
        return cls(size, DeviceRows(*views, *sizes), num_slots, block)

    def load(self, batch: ForwardBatch) -> None:
        """Copy the rows of a batch, whose size this is, to the device in one transfer."""
        lists = list_rows(batch.packed_rows, [len(span.tokens) for span in batch.spans])
        staging = make_staging(self.size.layout.num_numbers, self._block.device)
        views = self.size.layout.split(staging)
        for target, numbers in zip(views, lists, strict=True):
            target[: len(numbers)] = numbers
        self._pad(views, len(lists[TOKENS]), len(lists[TAILS]), len(lists[FIRST_ROW]))
        self._block.copy_(staging, non_blocking=True)

    def _pad(self, views: list[Tensor], num_rows: int, num_tails: int, num_bounds: int) -> None:
        """Fill the rows from `num_rows` on, the requests after them, and the path of one slot that the rows read."""
        views[WRITE][num_rows:] = NO_SLOT
        views[TAILS][num_tails] = NULL_PAGE * self.size.page_size
        views[TAIL_AT][num_rows:] = num_tails
        views[TAIL][num_rows:] = 1
        views[FIRST_ROW][num_bounds:] = self.size.rows

    @property
    def images(self) -> None:
        """None: passes with images are not recorded."""

    @cached_property
    def tokens(self) -> Tensor:
        """Token ids [1, T]."""
        return self.device_rows.tokens[None]

    @cached_property
    def positions(self) -> Tensor:
        """Positions [1, T]."""
        return self.device_rows.positions[None]

    @property
    def write_slots(self) -> Tensor:
        """Slots [T] of the rows' keys and values, -1 for padding."""
        return self.device_rows.write_slots

    @property
    def logit_rows(self) -> Tensor:
        """Rows [R] that need logits; row 0 as padding."""
        return self.device_rows.logit_rows

    @property
    def attention_groups(self) -> Any:
        """Raise ForedraftError: the masks of torch's operators have no fixed size."""
        raise ForedraftError("an attention layer runs on torch's operators, which need masks of the context's length")

    @property
    def packed_rows(self) -> Any:
        """Raise ForedraftError: these are rows of native CPU code."""
        raise ForedraftError("native CPU code is not recorded")
