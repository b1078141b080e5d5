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
from foredraft.kv.allocator import NULL_PAGE
from foredraft.source import EncoderSource
from foredraft.tree import TokenTree

AFTER_FINAL_NORM = -1  # the tap after the final norm: what lm_head reads, transformers' last_hidden_state
MAX_PADDED_ROWS = 32  # requests with at most this many rows share one padded attention call


class Span(NamedTuple):
    """One request's part of a window: nodes of its tree, on top of `start` tokens. Node n is written n places after
    them."""

    pages: Sequence[int]
    start: int  # committed tokens whose KV is written; position of node 0
    tokens: Sequence[int]
    depths: Sequence[int]  # of all nodes from 0
    parents: Sequence[int] | None = None  # of those nodes, -1 for node 0; None = a chain
    first_node: int = 0
    source: EncoderSource | None = None  # what the encoder read, for a model that has one
    node_subset: Sequence[int] | None = None  # the nodes that the tokens are; None = those from `first` on, the last

    @property
    def node_indices(self) -> Sequence[int]:
        """The nodes that the tokens are."""
        return (
            range(self.first_node, self.first_node + len(self.tokens)) if self.node_subset is None else self.node_subset
        )

    @property
    def num_nodes(self) -> int:
        """All nodes, those of passes before included."""
        return self.first_node + len(self.tokens) if self.node_subset is None else len(self.depths)

    @property
    def num_keys(self) -> int:
        """Keys that a row may see at most."""
        return self.start + self.num_nodes

    def find_path(self, node: int) -> list[int]:
        """From the tree's first node down to this one."""
        if self.parents is None:
            return list(range(node + 1))
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def build_ancestor_mask(self) -> Tensor:
        """[n, size] bool: which of the step's nodes every row sees, itself included."""
        n, own = len(self.tokens), self.num_nodes
        if self.parents is None:
            return torch.ones(n, own, dtype=torch.bool).tril(own - n)
        mask = torch.zeros(n, own, dtype=torch.bool)
        for row, node in enumerate(self.node_indices):
            mask[row, self.find_path(node)] = True
        return mask


@dataclass(frozen=True)
class AttentionGroup:
    """Requests whose attention is computed in one call: b requests, n rows and L keys each after padding."""

    rows: Tensor | None  # [b, n] rows of the packed window, padding repeats a row; None = all rows of the one request
    slots: Tensor | slice  # [b, L] rows of the pool, padding points to the null page; a slice where contiguous
    query_positions: Tensor  # [b, n]
    key_positions: Tensor  # [b, L]
    visible: Tensor | None  # [b, n, L] bool; None = everything
    span_indices: tuple[int, ...] = (0,)  # which spans of the window these are
    _bias_cache: dict[tuple[int | None, torch.dtype, int], Tensor | None] = field(default_factory=dict)

    def get_bias(self, sliding_window: int | None, dtype: torch.dtype, num_repeats: int = 1) -> Tensor | None:
        """[b, 1, repeats * n, L] additive mask, at most `sliding` positions back; made once per step, not per layer."""
        key = (sliding_window, dtype, num_repeats)
        if key not in self._bias_cache:
            once = self._compute_bias(sliding_window, dtype)
            self._bias_cache[key] = None if once is None else once.repeat(1, 1, num_repeats, 1)
        return self._bias_cache[key]

    def _compute_bias(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor | None:
        visible = self.visible
        if sliding_window is not None and self.key_positions.shape[1] > sliding_window:
            near = self.query_positions[:, :, None] - self.key_positions[:, None, :] < sliding_window
            visible = near if visible is None else visible & near
        if visible is None:
            return None
        zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return zeros.masked_fill(~visible, -torch.inf)[:, None]


@dataclass(frozen=True)
class ForwardBatch:
    """Rows are in the order of the spans, nodes in order within each. Tensors are made when first asked for."""

    spans: tuple[Span, ...]
    logit_row_list: Sequence[int]  # R packed rows whose logits are wanted
    page_size: int
    device: torch.device | str

    @classmethod
    def build(
        cls, spans: Sequence[Span], logit_rows: Sequence[int], page_size: int, device: torch.device | str
    ) -> "ForwardBatch":
        return cls(tuple(spans), logit_rows, page_size, device)

    @classmethod
    def from_spans(
        cls, spans: Sequence[Span], page_size: int, device: torch.device | str, last_only: bool = False
    ) -> "ForwardBatch":
        """With logits after every token, or after each span's last."""
        ends = list(accumulate(len(span.tokens) for span in spans))
        return cls.build(spans, [end - 1 for end in ends] if last_only else range(ends[-1]), page_size, device)

    @classmethod
    def from_token_tree(
        cls,
        tree: TokenTree,
        starts: Sequence[int],
        pages: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str,
        full_logit_requests: Sequence[int] = (),
        sources: Sequence[EncoderSource | None] | None = None,
    ) -> "ForwardBatch":
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
            logit_rows += range(offset + (0 if b in full_logit_requests else tree.roots[b]), offset + size)
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
        found = [span.start + span.depths[node] for span in self.spans for node in span.node_indices]
        return torch.tensor([found], device=self.device)

    @cached_property
    def write_slots(self) -> Tensor:
        """[T] the slot each key goes to."""
        size = self.page_size
        found = [
            span.pages[i // size] * size + i % size
            for span in self.spans
            for i in (span.start + node for node in span.node_indices)
        ]
        return torch.tensor(found, device=self.device)

    @cached_property
    def logit_rows(self) -> Tensor:
        """[R] packed rows whose logits are wanted."""
        return torch.tensor(self.logit_row_list, dtype=torch.int64, device=self.device)

    @cached_property
    def attention_groups(self) -> tuple[AttentionGroup, ...]:
        """The attention calls of the plain path."""
        return _build_groups(self.spans, self.page_size, self.device)

    @cached_property
    def packed_rows(self) -> PackedRows:
        """The same rows for the native path."""
        return PackedRows.pack(self.spans, self.logit_row_list, self.page_size)


def _build_groups(spans: Sequence[Span], page_size: int, device: torch.device | str) -> tuple[AttentionGroup, ...]:
    if len(spans) == 1:
        return (_build_single_group(spans[0], 0, None, page_size, device),)
    groups, padded, offset = [], [], 0
    for i, span in enumerate(spans):
        if len(span.tokens) > MAX_PADDED_ROWS:
            rows = torch.arange(offset, offset + len(span.tokens), device=device)[None]
            groups.append(_build_single_group(span, i, rows, page_size, device))
        else:
            padded.append((i, span, offset))
        offset += len(span.tokens)
    if padded:
        groups.append(_build_padded_group(padded, page_size, device))
    return tuple(groups)


def _compute_slots(pages: Sequence[int], length: int, page_size: int) -> slice | Tensor:
    table = pages[: -(-length // page_size)]
    if list(table) == list(range(table[0], table[0] + len(table))):
        return slice(table[0] * page_size, table[0] * page_size + length)
    return (torch.tensor(table)[:, None] * page_size + torch.arange(page_size)).flatten()[:length]


def _build_visibility(span: Span) -> Tensor | None:
    """[n, L] bool: every committed key, and the ancestors among the step's own nodes. None = all."""
    n = len(span.tokens)
    if span.parents is None and n == 1:
        return None
    return torch.cat([torch.ones(n, span.start, dtype=torch.bool), span.build_ancestor_mask()], 1)


def _compute_positions(span: Span) -> tuple[Tensor, Tensor]:
    depths = torch.tensor(span.depths)
    return span.start + depths[list(span.node_indices)], torch.cat([torch.arange(span.start), span.start + depths])


def _build_single_group(
    span: Span, span_index: int, rows: Tensor | None, page_size: int, device: torch.device | str
) -> AttentionGroup:
    slots = _compute_slots(span.pages, span.num_keys, page_size)
    visible, (queries, keys) = _build_visibility(span), _compute_positions(span)
    return AttentionGroup(
        rows,
        slots if isinstance(slots, slice) else slots[None].to(device),
        queries[None].to(device),
        keys[None].to(device),
        None if visible is None else visible[None].to(device),
        (span_index,),
    )


def _build_padded_group(
    spans: Sequence[tuple[int, Span, int]], page_size: int, device: torch.device | str
) -> AttentionGroup:
    n = max(len(span.tokens) for _, span, _ in spans)
    longest = max(span.num_keys for _, span, _ in spans)
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
        own = _compute_slots(span.pages, span.num_keys, page_size)
        slots[i, : span.num_keys] = torch.arange(own.start, own.stop) if isinstance(own, slice) else own
        queries[i, :size], keys[i, : span.num_keys] = _compute_positions(span)
        seen = _build_visibility(span)
        visible[i, :size, : span.num_keys] = True if seen is None else seen
        visible[i, size:] = visible[i, size - 1]
        queries[i, size:] = queries[i, size - 1]
    members = tuple(place for place, _, _ in spans)
    return AttentionGroup(
        rows.to(device), slots.to(device), queries.to(device), keys.to(device), visible.to(device), members
    )
