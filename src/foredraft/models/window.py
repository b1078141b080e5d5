"""All that one forward pass needs: packed tokens, where their keys go, and what each may see.

A window travels as an ordinary keyword argument through the model to the attention function; there is no global.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.kernels.rows import PackedRows
from foredraft.kv.blocks import NULL_PAGE
from foredraft.source import Source
from foredraft.tree import TokenTree

NORMED = -1  # the tap after the final norm: what lm_head reads, transformers' last_hidden_state
PADDED_ROWS = 32  # requests with at most this many rows share one padded attention call


class Span(NamedTuple):
    """One request's part of a window: nodes of its tree, on top of `start` tokens. Node n is written n places after
    them."""

    pages: Sequence[int]
    start: int  # committed tokens whose KV is written; position of node 0
    tokens: Sequence[int]
    depths: Sequence[int]  # of all nodes from 0
    parents: Sequence[int] | None = None  # of those nodes, -1 for node 0; None = a chain
    first: int = 0
    source: Source | None = None  # what the encoder read, for a model that has one
    rows: Sequence[int] | None = None  # the nodes that the tokens are; None = those from `first` on, the last

    @property
    def nodes(self) -> Sequence[int]:
        """The nodes that the tokens are."""
        return range(self.first, self.first + len(self.tokens)) if self.rows is None else self.rows

    @property
    def size(self) -> int:
        """All nodes, those of passes before included."""
        return self.first + len(self.tokens) if self.rows is None else len(self.depths)

    @property
    def length(self) -> int:
        """Keys that a row may see at most."""
        return self.start + self.size

    def path(self, node: int) -> list[int]:
        """From the tree's first node down to this one."""
        if self.parents is None:
            return list(range(node + 1))
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def ancestors(self) -> Tensor:
        """[n, size] bool: which of the step's nodes every row sees, itself included."""
        n, own = len(self.tokens), self.size
        if self.parents is None:
            return torch.ones(n, own, dtype=torch.bool).tril(own - n)
        mask = torch.zeros(n, own, dtype=torch.bool)
        for row, node in enumerate(self.nodes):
            mask[row, self.path(node)] = True
        return mask


@dataclass(frozen=True)
class Group:
    """Requests whose attention is computed in one call: b requests, n rows and L keys each after padding."""

    rows: Tensor | None  # [b, n] rows of the packed window, padding repeats a row; None = all rows of the one request
    slots: Tensor | slice  # [b, L] rows of the pool, padding points to the null page; a slice where contiguous
    query_positions: Tensor  # [b, n]
    key_positions: Tensor  # [b, L]
    visible: Tensor | None  # [b, n, L] bool; None = everything
    members: tuple[int, ...] = (0,)  # which spans of the window these are
    _biases: dict[tuple[int | None, torch.dtype, int], Tensor | None] = field(default_factory=dict)

    def bias(self, sliding: int | None, dtype: torch.dtype, repeats: int = 1) -> Tensor | None:
        """[b, 1, repeats * n, L] additive mask, at most `sliding` positions back; made once per step, not per layer."""
        key = (sliding, dtype, repeats)
        if key not in self._biases:
            once = self._make_bias(sliding, dtype)
            self._biases[key] = None if once is None else once.repeat(1, 1, repeats, 1)
        return self._biases[key]

    def _make_bias(self, sliding: int | None, dtype: torch.dtype) -> Tensor | None:
        visible = self.visible
        if sliding is not None and self.key_positions.shape[1] > sliding:
            near = self.query_positions[:, :, None] - self.key_positions[:, None, :] < sliding
            visible = near if visible is None else visible & near
        if visible is None:
            return None
        zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return zeros.masked_fill(~visible, -torch.inf)[:, None]


@dataclass(frozen=True)
class Window:
    """Rows are in the order of the spans, nodes in order within each. Tensors are made when first asked for."""

    spans: tuple[Span, ...]
    logit_row_list: Sequence[int]  # R packed rows whose logits are wanted
    page_size: int
    device: torch.device | str

    @classmethod
    def build(
        cls, spans: Sequence[Span], logit_rows: Sequence[int], page_size: int, device: torch.device | str
    ) -> "Window":
        return cls(tuple(spans), logit_rows, page_size, device)

    @classmethod
    def after(
        cls, spans: Sequence[Span], page_size: int, device: torch.device | str, last_only: bool = False
    ) -> "Window":
        """With logits after every token, or after each span's last."""
        ends = list(accumulate(len(span.tokens) for span in spans))
        return cls.build(spans, [end - 1 for end in ends] if last_only else range(ends[-1]), page_size, device)

    @classmethod
    def of_trees(
        cls,
        tree: TokenTree,
        starts: Sequence[int],
        pages: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str,
        every_row: Sequence[int] = (),
        sources: Sequence[Source | None] | None = None,
    ) -> "Window":
        """The pass that verifies a tree. Logits for its scored nodes, and for all nodes of requests in `every_row`."""
        spans: list[Span] = []
        logit_rows: list[int] = []
        offset = 0
        for b, (start, table) in enumerate(zip(starts, pages, strict=True)):
            size, parents = tree.sizes[b], tree.parent_lists[b]
            is_chain = size == 1 or parents == list(range(-1, size - 1))
            source = None if sources is None else sources[b]
            shape = None if is_chain else parents
            spans.append(Span(table, start, tree.token_lists[b], tree.depths[b], shape, 0, source))
            logit_rows += range(offset + (0 if b in every_row else tree.roots[b]), offset + size)
            offset += size
        return cls.build(spans, logit_rows, page_size, device)

    @cached_property
    def num_rows(self) -> int:
        return sum(len(span.tokens) for span in self.spans)

    @cached_property
    def num_slots(self) -> int:
        """Every slot named here lies below this."""
        return (max(max(span.pages) for span in self.spans) + 1) * self.page_size

    @cached_property
    def tokens(self) -> Tensor:
        """[1, T] packed ids."""
        return torch.tensor([[token for span in self.spans for token in span.tokens]], device=self.device)

    @cached_property
    def positions(self) -> Tensor:
        """[1, T] committed length + depth."""
        found = [span.start + span.depths[node] for span in self.spans for node in span.nodes]
        return torch.tensor([found], device=self.device)

    @cached_property
    def write(self) -> Tensor:
        """[T] the slot each key goes to."""
        size = self.page_size
        found = [
            span.pages[i // size] * size + i % size
            for span in self.spans
            for i in (span.start + node for node in span.nodes)
        ]
        return torch.tensor(found, device=self.device)

    @cached_property
    def logit_rows(self) -> Tensor:
        """[R] packed rows whose logits are wanted."""
        return torch.tensor(self.logit_row_list, dtype=torch.int64, device=self.device)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The attention calls of the plain path."""
        return _group(self.spans, self.page_size, self.device)

    @cached_property
    def packed(self) -> PackedRows:
        """The same rows for the native path."""
        return PackedRows.pack(self.spans, self.logit_row_list, self.page_size)


def _group(spans: Sequence[Span], page_size: int, device: torch.device | str) -> tuple[Group, ...]:
    if len(spans) == 1:
        return (_alone(spans[0], 0, None, page_size, device),)
    groups, padded, offset = [], [], 0
    for i, span in enumerate(spans):
        if len(span.tokens) > PADDED_ROWS:
            rows = torch.arange(offset, offset + len(span.tokens), device=device)[None]
            groups.append(_alone(span, i, rows, page_size, device))
        else:
            padded.append((i, span, offset))
        offset += len(span.tokens)
    if padded:
        groups.append(_padded(padded, page_size, device))
    return tuple(groups)


def _slots(pages: Sequence[int], length: int, page_size: int) -> slice | Tensor:
    table = pages[: -(-length // page_size)]
    if list(table) == list(range(table[0], table[0] + len(table))):
        return slice(table[0] * page_size, table[0] * page_size + length)
    return (torch.tensor(table)[:, None] * page_size + torch.arange(page_size)).flatten()[:length]


def _visible(span: Span) -> Tensor | None:
    """[n, L] bool: every committed key, and the ancestors among the step's own nodes. None = all."""
    n = len(span.tokens)
    if span.parents is None and n == 1:
        return None
    return torch.cat([torch.ones(n, span.start, dtype=torch.bool), span.ancestors()], 1)


def _positions(span: Span) -> tuple[Tensor, Tensor]:
    depths = torch.tensor(span.depths)
    return span.start + depths[list(span.nodes)], torch.cat([torch.arange(span.start), span.start + depths])


def _alone(span: Span, place: int, rows: Tensor | None, page_size: int, device: torch.device | str) -> Group:
    slots = _slots(span.pages, span.length, page_size)
    visible, (queries, keys) = _visible(span), _positions(span)
    return Group(
        rows,
        slots if isinstance(slots, slice) else slots[None].to(device),
        queries[None].to(device),
        keys[None].to(device),
        None if visible is None else visible[None].to(device),
        (place,),
    )


def _padded(spans: Sequence[tuple[int, Span, int]], page_size: int, device: torch.device | str) -> Group:
    n = max(len(span.tokens) for _, span, _ in spans)
    longest = max(span.length for _, span, _ in spans)
    b = len(spans)
    rows = torch.empty(b, n, dtype=torch.int64)
    slots = torch.full((b, longest), NULL_PAGE * page_size)
    queries, keys = torch.zeros(b, n, dtype=torch.int64), torch.zeros(b, longest, dtype=torch.int64)
    visible = torch.zeros(b, n, longest, dtype=torch.bool)
    visible[:, :, 0] = True  # a padded row sees one key: a row that sees nothing is NaN
    for i, (_, span, offset) in enumerate(spans):
        size = len(span.tokens)
        # a padded row repeats the last real one, so that scattering it back changes nothing
        rows[i] = offset + torch.arange(n).clamp_max(size - 1)
        own = _slots(span.pages, span.length, page_size)
        slots[i, : span.length] = torch.arange(own.start, own.stop) if isinstance(own, slice) else own
        queries[i, :size], keys[i, : span.length] = _positions(span)
        seen = _visible(span)
        visible[i, :size, : span.length] = True if seen is None else seen
        visible[i, size:] = visible[i, size - 1]
        queries[i, size:] = queries[i, size - 1]
    members = tuple(place for place, _, _ in spans)
    return Group(rows.to(device), slots.to(device), queries.to(device), keys.to(device), visible.to(device), members)
