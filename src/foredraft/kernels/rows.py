"""The rows of a pass as the native side reads them: one array of 32-bit numbers and where in it each list begins."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foredraft.kernels.cpu.library import Rows


class RowSpan(Protocol):
    """What of a request's part of a window is needed here: see models.window.Span."""

    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def first(self) -> int: ...
    @property
    def parents(self) -> Sequence[int] | None: ...


@dataclass(frozen=True)
class PackedRows:
    """`record` points into `numbers`, and is valid as long as this object lives."""

    record: Rows
    numbers: "ctypes.Array[ctypes.c_int32]"
    num_rows: int
    num_logits: int

    @classmethod
    def pack(cls, spans: Sequence[RowSpan], logit_rows: Sequence[int], page_size: int) -> "PackedRows":
        """Rows in the order of the spans. A row's path is the slots of its ancestors in the step, itself included."""
        columns: list[list[int]] = [[] for _ in range(8)]
        tokens, write, pages, page_at, tails, tail_at, start, tail = columns
        for span in spans:
            n = len(span.tokens)
            stop = span.start + span.first + n
            slots = [span.pages[i // page_size] * page_size + i % page_size for i in range(span.start, stop)]
            tokens += span.tokens
            write += slots[span.first :]
            page_at += [len(pages)] * n
            start += [span.start] * n
            pages += span.pages[: -(-stop // page_size)]
            if span.parents is None:
                tail_at += [len(tails)] * n
                tail += range(span.first + 1, span.first + n + 1)
                tails += slots
                continue
            for node in range(span.first, span.first + n):
                path = _path(span.parents, node)
                tail_at.append(len(tails))
                tail.append(len(path))
                tails += [slots[i] for i in path]
        longest = max(map(int.__add__, start, tail))
        return cls._of(columns, logit_rows, page_size, longest)

    @classmethod
    def _of(cls, columns: list[list[int]], logit_rows: Sequence[int], page_size: int, longest: int) -> "PackedRows":
        lists = [*columns, list(logit_rows)]
        flat = [number for numbers in lists for number in numbers]
        numbers = (ctypes.c_int32 * len(flat))(*flat)
        address, places = ctypes.addressof(numbers), []
        for numbers_of in lists:
            places.append(address)
            address += 4 * len(numbers_of)
        record = Rows(len(columns[0]), page_size, len(logit_rows), longest, *places)
        return cls(record, numbers, len(columns[0]), len(logit_rows))


def _path(parents: Sequence[int], node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
