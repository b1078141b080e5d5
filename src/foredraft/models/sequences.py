"""Rows of a forward batch as left-padded sequences, for models that compute attention in code of their own.

Such a model takes no tree mask, but every transformers model continues a batch of sequences of different lengths. So a
run of rows that follow one another becomes a sequence: its keys by rank, of which the last belong to its own rows. The
nodes of a tree below a branching are sequences of their own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from foredraft.kv.allocator import NULL_PAGE
from foredraft.models.forward_batch import MAX_PADDED_ROWS, ForwardBatch, Span

MAX_PADDED_KEYS = 1 << 15  # keys of all sequences of a group, padding included. Every layer copies them


@dataclass(frozen=True)
class RowRun:
    """Rows that follow one another on one path of a token tree."""

    first_row: int  # packed row
    num_rows: int
    start: int  # rank of the first row: number of keys before it
    slots: Sequence[int]  # slots of all keys that the last row sees, by rank


@dataclass(frozen=True)
class SequenceGroup:
    """Runs that one call of the model computes: b sequences, n rows and L keys each after padding on the left."""

    runs: tuple[RowRun, ...]
    page_size: int
    device: torch.device | str

    @property
    def num_columns(self) -> int:
        """Rows n of a sequence after padding."""
        return max(run.num_rows for run in self.runs)

    @property
    def num_keys(self) -> int:
        """Keys L of a sequence after padding."""
        return max(len(run.slots) for run in self.runs)

    @cached_property
    def columns(self) -> dict[int, tuple[int, int]]:
        """Sequence and column of every packed row of the group."""
        n = self.num_columns
        return {
            run.first_row + i: (b, n - run.num_rows + i) for b, run in enumerate(self.runs) for i in range(run.num_rows)
        }

    @cached_property
    def rows(self) -> Tensor:
        """Packed rows [b, n]. Padding repeats the first row of the run, and its results are not used."""
        return self._pad([list(range(run.first_row, run.first_row + run.num_rows)) for run in self.runs], None)

    @cached_property
    def slots(self) -> Tensor:
        """Slots [b, L] of the keys, with the null page as padding."""
        return self._pad([list(run.slots) for run in self.runs], NULL_PAGE * self.page_size)

    @cached_property
    def key_mask(self) -> Tensor:
        """Mask [b, L]: 1 for keys, 0 for padding."""
        return self._pad([[1] * len(run.slots) for run in self.runs], 0)

    @cached_property
    def real_rows(self) -> Tensor:
        """Indices of the rows that are no padding, in the flattened [b * n]."""
        n = self.num_columns
        flat = [b * n + column for b, column in self.columns.values()]
        return torch.tensor(flat, device=self.device)

    @cached_property
    def write_slots(self) -> Tensor:
        """Slots of the keys of `real_rows`."""
        slots = [slot for run in self.runs for slot in run.slots[-run.num_rows :]]
        return torch.tensor(slots, device=self.device)

    def _pad(self, lists: list[list[int]], filler: int | None) -> Tensor:
        longest = max(map(len, lists))
        padded = [[x[0] if filler is None else filler] * (longest - len(x)) + x for x in lists]
        return torch.tensor(padded, device=self.device)


def group_sequences(forward_batch: ForwardBatch, is_padded: bool) -> list[SequenceGroup]:
    """Divide a forward batch into groups, in an order in which the keys of ancestors are written first.

    Args:
        forward_batch: T packed rows.
        is_padded: whether a group may have sequences of different lengths.
    """
    groups: list[list[RowRun]] = []
    for run in _list_runs(forward_batch):
        if groups and _fits(groups[-1], run, is_padded):
            groups[-1].append(run)
        else:
            groups.append([run])
    return [SequenceGroup(tuple(runs), forward_batch.page_size, forward_batch.device) for runs in groups]


def _fits(runs: Sequence[RowRun], run: RowRun, is_padded: bool) -> bool:
    joined = [*runs, run]
    if not is_padded and (run.num_rows, run.start) != (runs[0].num_rows, runs[0].start):
        return False
    longest = max(len(r.slots) for r in joined)
    return max(r.num_rows for r in joined) <= MAX_PADDED_ROWS and longest * len(joined) <= MAX_PADDED_KEYS


def _list_runs(forward_batch: ForwardBatch) -> Iterator[RowRun]:
    offset = 0
    for span in forward_batch.spans:
        yield from _divide_span(span, offset, forward_batch.page_size)
        offset += len(span.tokens)


def _divide_span(span: Span, offset: int, page_size: int) -> Iterator[RowRun]:
    """Divide the rows of a request where a row does not follow the one before it."""
    nodes = list(span.node_indices)
    cuts = [0, *(i for i in range(1, len(nodes)) if _find_parent(span, nodes[i]) != nodes[i - 1]), len(nodes)]
    for begin, end in pairwise(cuts):
        path = span.find_path(nodes[end - 1])
        offsets = [*range(span.start), *(span.start + node for node in path)]
        slots = [span.pages[i // page_size] * page_size + i % page_size for i in offsets]
        yield RowRun(offset + begin, end - begin, len(slots) - (end - begin), slots)


def _find_parent(span: Span, node: int) -> int:
    return node - 1 if span.parents is None else span.parents[node]
