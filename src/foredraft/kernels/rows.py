"""Rows of a forward pass in the layout of the native code: one int32 array of nine lists, and their addresses."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from foredraft.kernels.cpu.records import RowsRecord


class RowSpan(Protocol):
    """The attributes of models.forward_batch.Span that packing reads."""

    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def parents(self) -> Sequence[int] | None: ...
    @property
    def node_subset(self) -> Sequence[int] | None: ...
    @property
    def node_indices(self) -> Sequence[int]: ...
    @property
    def num_keys(self) -> int: ...
    def find_path(self, node: int) -> list[int]: ...


@dataclass(frozen=True)
class PackedRows:
    """Packed rows. `record` points into `memory` and is valid as long as this object lives.

    The memory of fresh rows is an array of Python: a native pass needs no tensor, which takes longer to make.
    """

    record: RowsRecord
    memory: "array[int] | Tensor"  # int32: the nine lists of fd_rows, concatenated
    counts: tuple[int, ...]  # their lengths

    @cached_property
    def numbers(self) -> Tensor:
        """The nine lists, concatenated, as int32; they share `memory`."""
        return torch.frombuffer(self.memory, dtype=torch.int32) if isinstance(self.memory, array) else self.memory

    @property
    def num_rows(self) -> int:
        return int(self.record.num_rows)

    @property
    def num_logits(self) -> int:
        return int(self.record.num_logits)

    @classmethod
    def pack(
        cls, spans: Sequence[RowSpan], logit_rows: Sequence[int], page_size: int, ahead: Sequence[int] | None = None
    ) -> "PackedRows":
        """Pack the rows in the order of the spans.

        Args:
            spans: parts of requests.
            logit_rows: rows that need logits.
            page_size: slots per page.
            ahead: [T] keys after a row's own, in a chain, that it sees; they end its path. Default None = none.
        """
        lists: list[list[int]] = [[] for _ in range(8)]
        tokens, write, pages, page_at, tails, tail_at, start, tail = lists
        for span in spans:
            n, stop, nodes = len(span.tokens), span.num_keys, span.node_indices
            slots = [span.pages[i // page_size] * page_size + i % page_size for i in range(span.start, stop)]
            tokens += span.tokens
            write += slots[-n:] if span.node_subset is None else [slots[node] for node in nodes]
            page_at += [len(pages)] * n
            start += [span.start] * n
            pages += span.pages[: -(-stop // page_size)]
            if span.parents is None:
                tail_at += [len(tails)] * n
                tail += [node + 1 for node in nodes]
                if ahead is not None:
                    tail[-n:] = map(int.__add__, tail[-n:], ahead[len(tail) - n : len(tail)])
                tails += slots
                continue
            for node in nodes:
                path = span.find_path(node)
                if ahead is not None:
                    path += range(node + 1, node + 1 + ahead[len(tail)])
                tail_at.append(len(tails))
                tail.append(len(path))
                tails += [slots[i] for i in path]
        lists.append(list(logit_rows))
        flat = array("i")
        for numbers in lists:
            flat.extend(numbers)
        counts, longest = [len(numbers) for numbers in lists], max(map(int.__add__, start, tail))
        return cls._from_longest(flat, flat.buffer_info()[0], counts, page_size, longest)

    @classmethod
    def from_numbers(cls, numbers: Tensor, counts: Sequence[int], page_size: int) -> "PackedRows":
        """Make a record for the `numbers` and `counts` of other packed rows."""
        lists = _split_lists(numbers, counts)
        longest = max(map(int.__add__, lists[6], lists[7]))
        return cls._from_longest(numbers, numbers.data_ptr(), counts, page_size, longest)

    @classmethod
    def from_numbers_with_longest(
        cls, numbers: Tensor, counts: Sequence[int], page_size: int, longest: int
    ) -> "PackedRows":
        """Make a record from concatenated lists and `longest`, the most keys that any row sees."""
        return cls._from_longest(numbers, numbers.data_ptr(), counts, page_size, longest)

    @classmethod
    def _from_longest(
        cls, memory: "array[int] | Tensor", address: int, counts: Sequence[int], page_size: int, longest: int
    ) -> "PackedRows":
        addresses = []
        for count in counts:
            addresses.append(address)
            address += 4 * count
        return cls(RowsRecord(counts[0], page_size, counts[8], longest, *addresses), memory, tuple(counts))

    def list_slots(self, row: int) -> list[int]:
        """Return the pool slots that a row sees, in order."""
        _, _, pages, page_at, tails, tail_at, start, tail, _ = _split_lists(self.numbers, self.counts)
        size = int(self.record.page_size)
        table = pages[page_at[row] :]
        committed = [table[i // size] * size + i % size for i in range(start[row])]
        return committed + tails[tail_at[row] : tail_at[row] + tail[row]]


def _split_lists(numbers: Tensor, counts: Sequence[int]) -> list[list[int]]:
    return [part.tolist() for part in torch.split(numbers, list(counts))]
