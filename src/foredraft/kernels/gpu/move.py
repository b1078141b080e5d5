"""Moves of KV between slots, in all layers by one launch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.checks import check_contiguous

MAX_MOVES = 1024  # of one launch: all of them are in registers before the first is written
NUMBERS = 4096  # 32-bit numbers of a program
WORD = 4  # bytes of a number


@triton.jit(do_not_specialize=["num_moves"])
def move_slots(addresses, widths, sources, targets, num_moves, MOVES: tl.constexpr, COLUMNS: tl.constexpr):
    """Move some columns of all slots of one tensor. Grid (tensors, blocks of columns).

    Columns do not interact, so a program must only read all its rows before it writes one: a target may be the source
    of another move.
    """
    tensor = tl.program_id(0)
    width = tl.load(widths + tensor).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    move = tl.arange(0, MOVES)
    is_move = move < num_moves
    data = tl.load(addresses + tensor).to(tl.pointer_type(tl.int32))
    source = tl.load(sources + move, mask=is_move, other=0).to(tl.int64)
    target = tl.load(targets + move, mask=is_move, other=0).to(tl.int64)
    mask = is_move[:, None] & (column < width)[None, :]
    numbers = tl.load(data + source[:, None] * width + column[None, :], mask=mask)
    tl.debug_barrier()  # other threads of the program write what this one reads
    tl.store(data + target[:, None] * width + column[None, :], numbers, mask=mask)


@dataclass(frozen=True)
class PointerTable:
    """Addresses of tensors [S, ...] of several layers, for one launch. It is valid as long as they are."""

    addresses: Tensor  # [N] int64
    widths: Tensor  # [N] int32: 32-bit numbers in a slot
    widest: int

    @classmethod
    def make(cls, tensors: Sequence[Tensor]) -> "PointerTable":
        """Make the table.

        Args:
            tensors: keys and values of every layer, of any widths and types, on one device.

        Raises:
            ForedraftError: a tensor is not contiguous, or its slots are not whole 32-bit numbers.
        """
        widths = []
        for tensor in tensors:
            check_contiguous(cache=tensor)
            size = tensor[0].numel() * tensor.element_size()
            if size % WORD:
                raise ForedraftError(f"a slot of {size} bytes cannot be moved: it must be a multiple of {WORD}")
            widths.append(size // WORD)
        device = tensors[0].device
        addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(device)
        return cls(addresses, torch.tensor(widths, dtype=torch.int32).to(device), max(widths))


def move(table: PointerTable, sources: Tensor, targets: Tensor) -> None:
    """Copy slots to other slots in every tensor, all reads before any write.

    Args:
        table: tensors.
        sources: [N] slots.
        targets: [N] other slots, without repetition.

    Raises:
        ForedraftError: there are more than MAX_MOVES slots, or the lengths differ.
    """
    count = len(sources)
    if not 0 < count <= MAX_MOVES or len(targets) != count:
        raise ForedraftError(f"one launch moves 1 to {MAX_MOVES} slots to as many; got {count} and {len(targets)}")
    moves = triton.next_power_of_2(count)
    columns = min(max(NUMBERS // moves, 1), triton.next_power_of_2(table.widest))
    with torch.cuda.device_of(sources):  # triton launches on the current device
        move_slots[(len(table.widths), triton.cdiv(table.widest, columns))](
            table.addresses, table.widths, sources, targets, count, MOVES=moves, COLUMNS=columns, num_warps=4
        )
