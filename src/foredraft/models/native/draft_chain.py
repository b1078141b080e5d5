"""Chains of draft tokens in one native call: every pass of a draft network, and the sampling between the passes."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from foredraft.kernels.cpu.library import ChainRecord, PassRecord, RowsRecord
from foredraft.kernels.sampler import RACE_MARGIN, RowSettings
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.native.decoder import NativeDecoder


@dataclass(frozen=True)
class ChainPlan:
    """Inputs of the chain of one request."""

    pages: Sequence[int]  # block table of the request
    start: int  # position of the root's entry; the token at depth d has position start + d
    depth: int  # most tokens
    settings: RowSettings  # sampling parameters; temperature 0 = the likeliest tokens
    keys: Sequence[int]  # noise keys of the depths; () for the likeliest tokens
    end_ids: frozenset[int]  # tokens that end a draft
    uses_q: bool  # return q; only for sampled tokens


@dataclass(frozen=True)
class ChainTokens:
    """Draft tokens of B requests."""

    tokens: list[list[int]]
    q: Tensor | None  # [B, K + 1, V]: rows 0 to n of a request with n tokens, if its plan uses q

    def get_q(self, b: int, plan: ChainPlan) -> Tensor | None:
        """Return q [1 + n, V] of a request."""
        return None if self.q is None or not plan.uses_q else self.q[b, : 1 + len(self.tokens[b])]


@dataclass(frozen=True)
class NativeChains:
    """Native loop over the levels of chains."""

    decoder: NativeDecoder
    vocab_size: int  # V
    feature_layer: int | None = None  # boundary whose state the next level reads beside its token; None = no such input
    token_ids: Tensor | None = None  # [W] int32 token of each column of the logits, ascending; None = its index

    @cached_property
    def num_columns(self) -> int:
        """Number of columns of the logits that are tokens. Cached, since reading a record is slow."""
        return min(int(self.decoder.record.head.n), self.vocab_size)

    @property
    def reads_own_tokens(self) -> bool:
        """Whether the network has an embedding for every token that it drafts."""
        largest = self.num_columns - 1 if self.token_ids is None else int(self.token_ids[-1])
        return largest < self.decoder.vocab_size

    def draft(self, plans: Sequence[ChainPlan], pool: KVPool, first: ForwardBatch) -> ChainTokens | None:
        """Run a pass that ends with the roots of B drafts, and draft.

        Args:
            plans: B plans.
            pool: KV pool of the network.
            first: the pass; its rows of logits are those of the roots, in order.

        Returns:
            The tokens; None if rounding decides one of them, which is left to the reference.
        """
        logits = torch.empty(len(plans), self.decoder.record.head.n, dtype=torch.float32)
        self.decoder.check_tokens(first)
        return self._run(plans, pool, first, logits, None)

    def continue_drafts(
        self, plans: Sequence[ChainPlan], pool: KVPool, page_size: int, logits: Tensor, features: Tensor
    ) -> ChainTokens | None:
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
    ) -> ChainTokens | None:
        """Run the native call; `first` is the first pass, or the page size without one."""
        decoder, depth = self.decoder, max(plan.depth for plan in plans)
        rows = None if isinstance(first, int) else first.packed_rows.record
        page_size = first if isinstance(first, int) else first.page_size
        packed = _PackedPlans.pack(plans, depth, page_size, 0 if rows is None else rows.max_keys)
        decoder.extend_rotary(packed.max_keys)
        pool.reserve(decoder.kv_samples, (max(max(plan.pages) for plan in plans) + 1) * page_size)
        uses_q = any(plan.uses_q for plan in plans)
        q = torch.empty(len(plans), depth + 1, self.vocab_size) if uses_q else None
        record = packed.build_record(rows, page_size)
        record.columns, record.vocab = self.num_columns, self.vocab_size
        record.token_ids = None if self.token_ids is None else self.token_ids.data_ptr()
        record.q = None if q is None else q.data_ptr()
        decoder.native.sync_threads()
        handle = decoder.native.handle
        scratch = decoder.take_scratch(handle.fd_chain_scratch(decoder.record, record))
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
        decoder.return_scratch(scratch)
        if status == NO_MEMORY:
            raise MemoryError(f"no memory to sample from {self.vocab_size} tokens")
        return None if status else ChainTokens(packed.list_tokens(), q)


NO_MEMORY = -1  # status, with the value of chain.h


@dataclass(frozen=True)
class _PackedPlans:
    """Plans in the layout of the native code, as arrays of ctypes: numpy's take longer to address than to fill."""

    numbers: "ctypes.Array[ctypes.c_int32]"  # the lists of fd_chain, concatenated; then room for tokens and counts
    counts: tuple[int, ...]  # their lengths
    settings: "ctypes.Array[ctypes.c_double]"  # [B * 5]
    keys: "ctypes.Array[ctypes.c_int64]"  # [B * K]
    num_drafts: int  # B
    depth: int  # K
    max_keys: int  # most keys that a row sees

    @classmethod
    def pack(cls, plans: Sequence[ChainPlan], depth: int, page_size: int, max_keys: int) -> "_PackedPlans":
        """Pack plans for drafts of up to `depth` tokens. `max_keys` is that of the first pass."""
        lists: list[list[int]] = [[] for _ in range(9)]
        depths, starts, slots, pages, page_offset, ends, end_offset, uses_q, keys = lists
        settings: list[float] = []
        for plan in plans:
            table, start, end = plan.pages, plan.start, plan.start + plan.depth
            depths.append(plan.depth)
            starts.append(start)
            slots += [table[i // page_size] * page_size + i % page_size for i in range(start, end)]
            slots += slots[-1:] * (depth + 1 - plan.depth)  # the last token has no entry
            page_offset.append(len(pages))
            pages += table[: start // page_size + 1]
            end_offset.append(len(ends))
            ends += plan.end_ids
            uses_q.append(int(plan.uses_q))
            keys += plan.keys or [0] * plan.depth
            keys += [0] * (depth - plan.depth)
            settings += plan.settings
            max_keys = max(max_keys, end)
        size = len(plans)
        room = [0] * (size * depth), [0] * size
        packed = depths, starts, slots, pages, page_offset, ends, [*end_offset, len(ends)], uses_q, *room
        counts = tuple(map(len, packed))
        numbers = (ctypes.c_int32 * sum(counts))(*(number for part in packed for number in part))
        return cls(
            numbers,
            counts,
            (ctypes.c_double * len(settings))(*settings),
            (ctypes.c_int64 * len(keys))(*keys),
            size,
            depth,
            max_keys,
        )

    def build_record(self, first: RowsRecord | None, page_size: int) -> ChainRecord:
        """Build the record, without the fields of the network."""
        base = ctypes.addressof(self.numbers)
        addresses = [base + 4 * at for at in (0, *accumulate(self.counts))]
        depths, starts, slots, pages, page_offset, end_ids, end_offset, uses_q, tokens, counts, _ = addresses
        return ChainRecord(
            first=None if first is None else ctypes.pointer(first),
            settings=ctypes.addressof(self.settings),
            keys=ctypes.addressof(self.keys),
            depths=depths,
            starts=starts,
            slots=slots,
            pages=pages,
            page_offset=page_offset,
            end_ids=end_ids,
            end_offset=end_offset,
            uses_q=uses_q,
            tokens=tokens,
            counts=counts,
            margin=RACE_MARGIN,
            num_drafts=self.num_drafts,
            max_depth=self.depth,
            max_keys=self.max_keys,
            page_size=page_size,
        )

    def list_tokens(self) -> list[list[int]]:
        """Return the tokens of every draft."""
        size, depth = self.num_drafts, self.depth
        found = self.numbers[-size * (depth + 1) :]
        return [found[b * depth : b * depth + n] for b, n in enumerate(found[-size:])]
