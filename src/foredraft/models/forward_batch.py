"""Input of one forward pass: packed tokens, KV slots of their keys, and attention masks.

A ForwardBatch reaches the attention function as a keyword argument of the model. There is no global state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.rows import DeviceRows
from foredraft.kernels.low_rank import AdaptedRows
from foredraft.kernels.rows import PackedRows
from foredraft.kv.allocator import NULL_PAGE
from foredraft.loaded_adapter import LoadedAdapter
from foredraft.models.pass_images import PassImages
from foredraft.models.span import Span as Span
from foredraft.placed_images import PlacedImages
from foredraft.source import EncoderSource
from foredraft.tree import TokenTree

# Layer boundary after the final norm: the input of lm_head, transformers' last_hidden_state.
AFTER_FINAL_NORM = -1
MAX_PADDED_ROWS = 32  # requests with at most this many rows share one padded attention call


@dataclass(frozen=True)
class AttentionGroup:
    """Requests that share one attention call: b requests, n rows and L keys each after padding."""

    rows: Tensor | None  # [b, n] packed rows, the last one repeated as padding; None = all rows of the only request
    slots: Tensor | slice  # [b, L] slots of the pool, the null page as padding; a slice if they are contiguous
    query_positions: Tensor  # [b, n]
    key_positions: Tensor  # [b, L]
    visible: Tensor | None  # [b, n, L] bool; None = all keys are visible
    span_indices: tuple[int, ...] = (0,)  # [b] indices of the spans in the forward batch
    has_local_blocks: bool = False  # layers without a sliding window show no row a later token of an image
    _bias_cache: dict[tuple[int | None, torch.dtype, int], Tensor | None] = field(default_factory=dict)

    def get_bias(self, sliding_window: int | None, dtype: torch.dtype, num_repeats: int = 1) -> Tensor | None:
        """Return the additive attention mask. It is computed once per forward pass, not per layer.

        Args:
            sliding_window: maximum number of positions that a row sees, its own included; None = all.
            dtype: dtype of the mask.
            num_repeats: copies of the n rows. Default 1.

        Returns:
            [b, 1, num_repeats * n, L], or None if all keys are visible.
        """
        key = (sliding_window, dtype, num_repeats)
        if key not in self._bias_cache:
            bias = self._compute_bias(sliding_window, dtype)
            self._bias_cache[key] = None if bias is None else bias.repeat(1, 1, num_repeats, 1)
        return self._bias_cache[key]

    def _compute_bias(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor | None:
        visible = self.visible
        if sliding_window is not None and self.key_positions.shape[1] > sliding_window:
            near = self.query_positions[:, :, None] - self.key_positions[:, None, :] < sliding_window
            visible = near if visible is None else visible & near
        if sliding_window is None and self.has_local_blocks:
            earlier = self.key_positions[:, None, :] <= self.query_positions[:, :, None]
            visible = earlier if visible is None else visible & earlier
        if visible is None:
            return None
        zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return zeros.masked_fill(~visible, -torch.inf)[:, None]


@dataclass(frozen=True)
class ForwardBatch:
    """Input of one forward pass: T packed rows, ordered by span, then by node. Tensors are built on first access."""

    spans: tuple[Span, ...]
    logit_row_list: Sequence[int]  # [R] packed rows that need logits
    page_size: int  # slots per page
    device: torch.device | str
    made_rows: DeviceRows | None = None  # rows that are on the device already; there are no spans then
    reads_all_states: bool = True  # False: hidden states of rows without logits are not read, and may be zeros

    @classmethod
    def from_device_rows(cls, rows: DeviceRows, device: torch.device | str) -> "ForwardBatch":
        """Make the batch of rows on a device, whose addresses stay, as in a recorded pass.

        The KV pool must have all of its tensors already, and GPU kernels.
        """
        return cls((), (), rows.page_size, device, rows)

    @classmethod
    def build(
        cls, spans: Sequence[Span], logit_rows: Sequence[int], page_size: int, device: torch.device | str
    ) -> "ForwardBatch":
        """Build a forward batch; arguments as the fields of the class."""
        return cls(tuple(spans), logit_rows, page_size, device)

    @classmethod
    def from_spans(
        cls, spans: Sequence[Span], page_size: int, device: torch.device | str, last_only: bool = False
    ) -> "ForwardBatch":
        """Build a forward batch with logits for every row, or only for the last row of each span (`last_only`)."""
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
        adapters: Sequence[LoadedAdapter | None] | None = None,
        images: Sequence[PlacedImages | None] | None = None,
        reads_all_states: bool = True,
    ) -> "ForwardBatch":
        """Build the forward pass that verifies a token tree.

        Args:
            tree: token trees of B requests.
            starts: [B] tokens with KV.
            pages: [B] page ids.
            page_size: slots per page.
            device: device of the tensors.
            full_logit_requests: batch indices with logits for all nodes. Others have them for scored nodes only.
            sources: [B] encoder inputs. Default None = no encoder.
            adapters: [B] LoRA adapters. Default None = no request has one.
            images: [B] images of the prompts. Default None = no request has any.
            reads_all_states: see the field of the class. Default True.
        """
        spans: list[Span] = []
        logit_rows: list[int] = []
        offset = 0
        for b, (start, table) in enumerate(zip(starts, pages, strict=True)):
            size, parents = tree.sizes[b], tree.parents[b]
            is_chain = size == 1 or parents == list(range(-1, size - 1))
            source = None if sources is None else sources[b]
            shape = None if is_chain else parents
            num_settled = min(tree.roots[b], size - 1)
            adapter = None if adapters is None else adapters[b]
            placed = None if images is None else images[b]
            spans.append(
                Span(table, start, tree.tokens[b], tree.depths[b], shape, 0, source, None, num_settled, adapter, placed)
            )
            logit_rows += range(offset + (0 if b in full_logit_requests else tree.roots[b]), offset + size)
            offset += size
        return cls(tuple(spans), logit_rows, page_size, device, reads_all_states=reads_all_states)

    @cached_property
    def num_rows(self) -> int:
        """Number of packed rows T."""
        if self.made_rows is not None:
            return self.made_rows.num_rows
        return sum(len(span.tokens) for span in self.spans)

    @cached_property
    def num_slots(self) -> int:
        """Number of slots that the pool needs: every slot of the batch lies below it. 0 = those that it has."""
        return (max((max(span.pages) for span in self.spans), default=-1) + 1) * self.page_size

    @property
    def is_staged(self) -> bool:
        """Whether all inputs reach the device in one transfer."""
        return self.made_rows is not None or torch.device(self.device).type != "cpu"

    @cached_property
    def tokens(self) -> Tensor:
        """Packed token ids [1, T]."""
        if self.is_staged:
            return self.device_rows.tokens[None]
        return torch.tensor([[token for span in self.spans for token in span.tokens]], device=self.device)

    @cached_property
    def positions(self) -> Tensor:
        """Positions [1, T] of the rows: start + depth; [A, 1, T] if those of a request have several axes."""
        if self.images is not None and self.images.positions is not None:
            return self.images.positions[:, None].to(self.device)
        if self.is_staged:
            return self.device_rows.positions[None]
        positions = [span.start + span.depths[node] for span in self.spans for node in span.node_indices]
        return torch.tensor([positions], device=self.device)

    @cached_property
    def write_slots(self) -> Tensor:
        """Slots [T] of the pool to which the rows' keys and values are written."""
        if self.is_staged:
            return self.device_rows.write_slots
        size = self.page_size
        slots = [
            span.pages[i // size] * size + i % size
            for span in self.spans
            for i in (span.start + node for node in span.node_indices)
        ]
        return torch.tensor(slots, device=self.device)

    @cached_property
    def logit_rows(self) -> Tensor:
        """Packed rows [R] that need logits."""
        if self.is_staged:
            return self.device_rows.logit_rows
        return torch.tensor(self.logit_row_list, dtype=torch.int64, device=self.device)

    @cached_property
    def attention_groups(self) -> tuple[AttentionGroup, ...]:
        """Attention calls of the path without native code.

        Raises:
            ForedraftError: the rows are those of a recorded pass: the masks of torch's operators have no fixed size.
        """
        if self.made_rows is not None:
            raise ForedraftError(
                "an attention layer runs on torch's operators, which need masks of the context's length"
            )
        return _build_groups(self.spans, self.page_size, self.device)

    @cached_property
    def packed_rows(self) -> PackedRows:
        """Rows in the layout of the native code. Raises ForedraftError for rows of a recorded pass."""
        if self.made_rows is not None:
            raise ForedraftError("native CPU code is not recorded")
        return PackedRows.pack(self.spans, self.logit_row_list, self.page_size)

    @cached_property
    def has_adapters(self) -> bool:
        """Whether some row has an adapter."""
        return any(span.adapter is not None for span in self.spans)

    @cached_property
    def adapted_rows(self) -> AdaptedRows | None:
        """Rows with adapters in the layout of the native code; None if no row has one."""
        if not self.has_adapters:
            return None
        adapters = [None if span.adapter is None else span.adapter.native for span in self.spans]
        return AdaptedRows.pack(adapters, [len(span.tokens) for span in self.spans])

    @cached_property
    def images(self) -> PassImages | None:
        """Changes of the pass by images; None = nothing."""
        return PassImages.collect(self.spans)

    @cached_property
    def visible_rows(self) -> PackedRows:
        """`packed_rows`, where tokens of images see later ones too."""
        if self.images is None or not self.images.has_blocks:
            return self.packed_rows
        return self.pack_ahead(self.images.ahead)

    def pack_ahead(self, ahead: Sequence[int]) -> PackedRows:
        """Pack the rows for native code; `ahead`: [T] rows after its own, in a chain, that a row sees."""
        return PackedRows.pack(self.spans, self.logit_row_list, self.page_size, ahead)

    @cached_property
    def device_rows(self) -> DeviceRows:
        """Rows on the device: inputs of modules and GPU kernels."""
        if self.made_rows is not None:
            return self.made_rows
        return DeviceRows.pack(self.packed_rows, [len(span.tokens) for span in self.spans], self.device)


def _build_groups(spans: Sequence[Span], page_size: int, device: torch.device | str) -> tuple[AttentionGroup, ...]:
    """Group the spans: long ones have their own attention call, all others share a padded one."""
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
    """Compute the slots of the first `length` offsets of a request; a slice if its pages are contiguous."""
    table = pages[: -(-length // page_size)]
    if list(table) == list(range(table[0], table[0] + len(table))):
        return slice(table[0] * page_size, table[0] * page_size + length)
    return (torch.tensor(table)[:, None] * page_size + torch.arange(page_size)).flatten()[:length]


def _build_visibility(span: Span) -> Tensor | None:
    """Build a mask [n, L]: all keys before node 0, then each row's ancestors and itself. None = all keys."""
    n = len(span.tokens)
    if span.parents is None and n == 1:
        return None
    return torch.cat([torch.ones(n, span.start, dtype=torch.bool), span.build_ancestor_mask()], 1)


def _compute_positions(span: Span) -> tuple[Tensor, Tensor]:
    """Compute the positions of the rows [n] and of the keys [L]."""
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
        span.has_local_blocks,
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
    visible[:, :, 0] = True  # every row sees one key, since the softmax of a row without keys is NaN
    for i, (_, span, offset) in enumerate(spans):
        size = len(span.tokens)
        # Padding repeats the last row of the span, so writing the results back by row index stays correct.
        rows[i] = offset + torch.arange(n).clamp_max(size - 1)
        span_slots = _compute_slots(span.pages, span.num_keys, page_size)
        slots[i, : span.num_keys] = (
            torch.arange(span_slots.start, span_slots.stop) if isinstance(span_slots, slice) else span_slots
        )
        queries[i, :size], keys[i, : span.num_keys] = _compute_positions(span)
        mask = _build_visibility(span)
        visible[i, :size, : span.num_keys] = True if mask is None else mask
        visible[i, size:] = visible[i, size - 1]
        queries[i, size:] = queries[i, size - 1]
    indices = tuple(index for index, _, _ in spans)
    is_local = any(span.has_local_blocks for _, span, _ in spans)
    return AttentionGroup(
        rows.to(device), slots.to(device), queries.to(device), keys.to(device), visible.to(device), indices, is_local
    )
