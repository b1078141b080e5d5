"""The rows of a pass as the native side reads them: one array of 32-bit numbers and where in it each list begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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
    def parents(self) -> Sequence[int] | None: ...
    @property
    def rows(self) -> Sequence[int] | None: ...
    @property
    def nodes(self) -> Sequence[int]: ...
    @property
    def length(self) -> int: ...
    def path(self, node: int) -> list[int]: ...


@dataclass(frozen=True)
class PackedRows:
    """`record` points into `numbers`, and is valid as long as this object lives."""

    record: Rows
    numbers: Tensor  # int32: the nine lists of fd_window end to end
    counts: tuple[int, ...]  # their lengths

    @property
    def num_rows(self) -> int:
        return int(self.record.rows)

    @property
    def num_logits(self) -> int:
        return int(self.record.num_logits)

    @classmethod
    def pack(cls, spans: Sequence[RowSpan], logit_rows: Sequence[int], page_size: int) -> "PackedRows":
        """Rows in the order of the spans. A row's path is the slots of its ancestors in the step, itself included."""
        lists: list[list[int]] = [[] for _ in range(8)]
        tokens, write, pages, page_at, tails, tail_at, start, tail = lists
        for span in spans:
            n, stop, nodes = len(span.tokens), span.length, span.nodes
            slots = [span.pages[i // page_size] * page_size + i % page_size for i in range(span.start, stop)]
            tokens += span.tokens
            write += slots[-n:] if span.rows is None else [slots[node] for node in nodes]
            page_at += [len(pages)] * n
            start += [span.start] * n
            pages += span.pages[: -(-stop // page_size)]
            if span.parents is None:
                tail_at += [len(tails)] * n
                tail += [node + 1 for node in nodes]
                tails += slots
                continue
            for node in nodes:
                path = span.path(node)
                tail_at.append(len(tails))
                tail.append(len(path))
                tails += [slots[i] for i in path]
        lists.append(list(logit_rows))
        flat = [number for numbers in lists for number in numbers]
        return cls._of(torch.tensor(flat, dtype=torch.int32), [len(x) for x in lists], page_size, start, tail)

    @classmethod
    def of(cls, numbers: Tensor, counts: Sequence[int], page_size: int) -> "PackedRows":
        """From `numbers` and `counts` of another."""
        lists = _lists(numbers, counts)
        return cls._of(numbers, counts, page_size, lists[6], lists[7])

    @classmethod
    def held(cls, numbers: Tensor, counts: Sequence[int], page_size: int, longest: int) -> "PackedRows":
        """From lists end to end, for a caller that knows how far the row sees that sees most."""
        return cls._at(numbers, counts, page_size, longest)

    @classmethod
    def _of(
        cls, numbers: Tensor, counts: Sequence[int], page_size: int, start: list[int], tail: list[int]
    ) -> "PackedRows":
        return cls._at(numbers, counts, page_size, max(map(int.__add__, start, tail)))

    @classmethod
    def _at(cls, numbers: Tensor, counts: Sequence[int], page_size: int, longest: int) -> "PackedRows":
        address, places = numbers.data_ptr(), []
        for count in counts:
            places.append(address)
            address += 4 * count
        return cls(Rows(counts[0], page_size, counts[8], longest, *places), numbers, tuple(counts))

    def slots(self, row: int) -> list[int]:
        """The pool slots a row sees, in order."""
        _, _, pages, page_at, tails, tail_at, start, tail, _ = _lists(self.numbers, self.counts)
        size = int(self.record.page_size)
        table = pages[page_at[row] :]
        committed = [table[i // size] * size + i % size for i in range(start[row])]
        return committed + tails[tail_at[row] : tail_at[row] + tail[row]]


def _lists(numbers: Tensor, counts: Sequence[int]) -> list[list[int]]:
    return [part.tolist() for part in torch.split(numbers, list(counts))]
