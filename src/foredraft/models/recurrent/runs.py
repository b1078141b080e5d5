"""Runs of a forward pass: which rows a recurrent layer computes from which state, level by level.

A run is a chain of rows from one state to another, the one after its last row. The rows of a prompt chunk are few runs;
every node of a draft is a run of its own, because any of them may be the last accepted one. The runs of a level begin
with states of earlier passes or earlier levels, so a layer computes them together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from foredraft.kernels.mixers import NativeRuns
from foredraft.kv.state_pool import StatePool
from foredraft.kv.state_table import StateTable
from foredraft.models.forward_batch import ForwardBatch, Span

# Pages between two states that a long prompt chunk keeps for the prefix cache, aside from its last ones.
PAGES_BETWEEN_STATES = 16


@dataclass(frozen=True)
class Run:
    """Chain of rows of one request."""

    level: int
    first_row: int  # packed rows of a run are consecutive
    length: int
    start_state: int  # state before its first row
    end_state: int  # state after its last row


@dataclass(frozen=True)
class RunGroup:
    """Runs of equal length and level: n runs of L rows."""

    rows: Tensor  # [n, L] packed rows
    start_states: Tensor  # [n]
    end_states: Tensor  # [n]
    starts_empty: bool  # every run begins with the null state


@dataclass(frozen=True)
class RunPlan:
    """Runs of a pass, every run after the one that computes its start state."""

    runs: list[Run]
    device: torch.device | str

    @cached_property
    def groups(self) -> list[RunGroup]:
        """Runs of equal level and length together, in an order in which every start state exists before it is read."""
        groups: dict[tuple[int, int], list[Run]] = {}
        for run in self.runs:
            groups.setdefault((run.level, run.length), []).append(run)
        return [_make_group(groups[key], self.device) for key in sorted(groups)]

    @cached_property
    def native_runs(self) -> NativeRuns:
        """Runs in the layout of the native code."""
        fields = ((run.first_row, run.length, run.start_state, run.end_state) for run in self.runs)
        return NativeRuns.pack(*zip(*fields, strict=True))


def plan_runs(forward_batch: ForwardBatch, states: StatePool) -> RunPlan:
    """Plan the runs of a pass, and allocate their states.

    Args:
        forward_batch: rows of the pass.
        states: pool of the model's states.

    Raises:
        RuntimeError: there is no state after a token before the pass.
    """
    table = states.get_table(forward_batch.page_size)
    runs: list[Run] = []
    offset = 0
    for span in forward_batch.spans:
        runs += _plan_span(span, offset, table, PAGES_BETWEEN_STATES if states.continues_chunks else None)
        offset += len(span.tokens)
    states.reserve(table.num_ids)
    return RunPlan(runs, forward_batch.device)


def _plan_span(span: Span, offset: int, table: StateTable, pages_between: int | None) -> Iterator[Run]:
    is_first_pass = span.first_node == 0 and span.node_subset is None
    if is_first_pass:
        table.rewind(span.pages, span.start)
    ends: dict[int, tuple[int, int]] = {}  # node -> state after it, and level of the runs that begin there
    row = offset
    for size, node in _split(span, is_first_pass, table.page_size, pages_between):
        parent = node - 1 if span.parents is None or size > 1 else span.parents[node]
        if parent not in ends:
            state = table.find(span.pages, span.start + parent + 1)
            if state is None:
                raise RuntimeError(f"no recurrent state after token {span.start + parent}")
            ends[parent] = state, 0
        start_state, level = ends[parent]
        last = node + size - 1
        ends[last] = table.add(span.pages, span.start + last), level + 1
        yield Run(level, row, size, start_state, ends[last][0])
        row += size


def _split(span: Span, is_first_pass: bool, page_size: int, pages_between: int | None) -> Iterator[tuple[int, int]]:
    """Split a span into runs: (number of rows, first node)."""
    begin = 0
    if is_first_pass and span.num_settled:
        stop = min(span.num_settled + 1, len(span.tokens))  # the node after the settled ones follows them
        for end in _choose_ends(span.start, stop, page_size, pages_between):
            yield end - begin, begin
            begin = end
    for node in list(span.node_indices)[begin:]:
        yield 1, node


def _choose_ends(start: int, stop: int, page_size: int, pages_between: int | None) -> list[int]:
    """Choose after how many nodes of a chunk of `stop` nodes a state is kept: its end, and ends of pages.

    These are the last two pages, for requests that share all of the chunk or all but its last token, and one of
    every `pages_between` pages; None = no others.
    """
    page_ends = range((start // page_size + 1) * page_size, start + stop, page_size)
    kept = {*page_ends[-2:], *(end for end in page_ends if pages_between and end // page_size % pages_between == 0)}
    return sorted({stop} | {end - start for end in kept})


def _make_group(runs: Sequence[Run], device: torch.device | str) -> RunGroup:
    length = runs[0].length
    firsts, starts, ends = zip(*((run.first_row, run.start_state, run.end_state) for run in runs), strict=True)
    packed = torch.tensor([firsts, starts, ends]).to(device)  # one transfer
    rows = packed[0][:, None] + torch.arange(length, device=device)
    return RunGroup(rows, packed[1], packed[2], not any(starts))
