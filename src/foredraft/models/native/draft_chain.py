"""Chains of draft tokens in one native call: every pass of a draft network, and the sampling between the passes."""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from foredraft.kernels.cpu.records import ChainRecord, PassRecord, RowsRecord
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.native.decoder import NativeDecoder
from foredraft.models.native.draft_plans import DraftPlan, DraftTokens, PackedDrafts


@dataclass(frozen=True)
class ChainPlan(DraftPlan):
    """Inputs of the chain of one request, with its place in the KV cache."""

    pages: Sequence[int]  # block table of the request
    start: int  # position of the root's entry; the token at depth d has position start + d


@dataclass(frozen=True)
class NativeChains:
    """Native loop over the levels of chains."""

    decoder: NativeDecoder
    vocab_size: int  # V
    feature_layer: int | None = None  # boundary whose state the next level reads beside its token; None = no such input
    token_ids: Tensor | None = None  # [W] int32 token of each column of the logits, ascending; None = its index

    @cached_property
    def num_logits(self) -> int:
        """Width of the rows of logits. Cached, since reading a record is slow."""
        return int(self.decoder.record.head.n)

    @property
    def num_columns(self) -> int:
        """Number of columns of the logits that are tokens."""
        return min(self.num_logits, self.vocab_size)

    @property
    def reads_own_tokens(self) -> bool:
        """Whether the network has an embedding for every token that it drafts."""
        largest = self.num_columns - 1 if self.token_ids is None else int(self.token_ids[-1])
        return largest < self.decoder.vocab_size

    def draft(self, plans: Sequence[ChainPlan], pool: KVPool, first: ForwardBatch) -> DraftTokens | None:
        """Run a pass that ends with the roots of B drafts, and draft.

        Args:
            plans: B plans.
            pool: KV pool of the network.
            first: the pass; its rows of logits are those of the roots, in order.

        Returns:
            The tokens; None if rounding decides one of them, which is left to the reference.
        """
        logits = torch.empty(len(plans), self.num_logits, dtype=torch.float32)
        self.decoder.check_tokens(first)
        return self._run(plans, pool, first, logits, None)

    def continue_drafts(
        self, plans: Sequence[ChainPlan], pool: KVPool, page_size: int, logits: Tensor, features: Tensor
    ) -> DraftTokens | None:
        """Draft from the outputs of a pass, for a network that reads features.

        Args:
            plans: B plans.
            pool: KV pool of the network.
            page_size: slots per page.
            logits: logits [B, W] after the roots, float32.
            features: features [B, H] at the roots, float32.

        Returns:
            As `draft`.
        """
        return self._run(plans, pool, page_size, logits.contiguous(), features.contiguous())

    def _run(
        self,
        plans: Sequence[ChainPlan],
        pool: KVPool,
        first: ForwardBatch | int,
        logits: Tensor,
        features: Tensor | None,
    ) -> DraftTokens | None:
        """Run the native call; `first` is the first pass, or the page size without one."""
        decoder = self.decoder
        rows = None if isinstance(first, int) else first.packed_rows.record
        page_size = first if isinstance(first, int) else first.page_size
        drafts = PackedDrafts.pack(plans, self.num_columns, self.vocab_size, self.token_ids)
        places = _PackedPlaces.pack(plans, page_size)
        max_keys = places.max_keys if rows is None else max(places.max_keys, rows.max_keys)
        decoder.extend_rotary(max_keys)
        pool.reserve(decoder.kv_samples, (max(max(plan.pages) for plan in plans) + 1) * page_size)
        record = places.build_record(drafts, rows, page_size, max_keys)
        decoder.native.sync_threads()
        handle = decoder.native.handle
        scratch = decoder.scratch.take(handle.fd_chain_scratch(decoder.record, record))
        keys, values = pool.addresses
        boundary = (ctypes.c_int32 * 1)(self.feature_layer or 0)
        job = PassRecord(
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            hidden_layers=ctypes.addressof(boundary),
            hidden_layer_count=int(self.feature_layer is not None),
            features=None if features is None else features.data_ptr(),
            logits=logits.data_ptr(),
            scratch=scratch.data_ptr(),
        )
        status = handle.fd_draft_chains(decoder.record, record, job)
        decoder.scratch.give_back(scratch)
        return drafts.read(status)


@dataclass(frozen=True)
class _PackedPlaces:
    """Places of chains in the KV cache, in the layout of the native code."""

    numbers: "array[int]"  # int32: the lists of fd_chain, concatenated
    counts: tuple[int, ...]  # their lengths
    max_keys: int  # most keys that a row of the chains sees

    @classmethod
    def pack(cls, plans: Sequence[ChainPlan], page_size: int) -> "_PackedPlaces":
        """Pack the places of B plans."""
        depth = max(plan.depth for plan in plans)
        starts: list[int] = []
        slots: list[int] = []
        pages: list[int] = []
        page_offset: list[int] = []
        for plan in plans:
            table, start, end = plan.pages, plan.start, plan.start + plan.depth
            starts.append(start)
            slots += [table[i // page_size] * page_size + i % page_size for i in range(start, end)]
            slots += slots[-1:] * (depth + 1 - plan.depth)  # the last token has no entry
            page_offset.append(len(pages))
            pages += table[: start // page_size + 1]
        packed = starts, page_offset, slots, pages
        numbers = array("i", [*starts, *page_offset, *slots, *pages])
        return cls(numbers, tuple(map(len, packed)), max(plan.start + plan.depth for plan in plans))

    def build_record(
        self, drafts: PackedDrafts, first: RowsRecord | None, page_size: int, max_keys: int
    ) -> ChainRecord:
        """Build the record; `first` is the first pass."""
        base = self.numbers.buffer_info()[0]
        starts, page_offset, slots, pages, _ = (base + 4 * at for at in (0, *accumulate(self.counts)))
        return ChainRecord(
            drafts=drafts.record,
            first=None if first is None else ctypes.pointer(first),
            starts=starts,
            slots=slots,
            pages=pages,
            page_offset=page_offset,
            max_keys=max_keys,
            page_size=page_size,
        )
