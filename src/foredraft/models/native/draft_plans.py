"""Plans and results of native loops that sample chains of draft tokens, without the part of the network."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.kernels.cpu.records import DraftsRecord
from foredraft.kernels.sampler import RACE_MARGIN, RowSettings

NO_MEMORY = -1  # status, with the value of draft_level.h


@dataclass(frozen=True)
class DraftPlan:
    """Sampling of the chain of one request."""

    depth: int  # most tokens
    settings: RowSettings  # sampling parameters; temperature 0 = the likeliest tokens
    keys: Sequence[int]  # noise keys of the depths; () for the likeliest tokens
    end_ids: frozenset[int]  # tokens that end a draft
    uses_q: bool  # return q; only for sampled tokens


@dataclass(frozen=True)
class DraftTokens:
    """Draft tokens of B requests."""

    tokens: list[list[int]]
    q: Tensor | None  # [B, K + 1, V]: rows 0 to n of a request with n tokens, if its plan uses q

    def get_q(self, b: int, plan: DraftPlan) -> Tensor | None:
        """Return q [1 + n, V] of a request."""
        return None if self.q is None or not plan.uses_q else self.q[b, : 1 + len(self.tokens[b])]


@dataclass(frozen=True)
class PackedDrafts:
    """Plans in the layout of the native code, in arrays of Python: a tensor takes longer to make than to fill.

    `record` points into the other fields and is valid as long as this object lives.
    """

    record: DraftsRecord
    numbers: "array[int]"  # int32: the lists of fd_drafts, then room for tokens and counts
    settings: "array[float]"  # [B * 5]
    keys: "array[int]"  # [B * K] int64
    q: Tensor | None  # [B, K + 1, V], not filled
    num_drafts: int  # B
    depth: int  # K

    @classmethod
    def pack(
        cls, plans: Sequence[DraftPlan], num_columns: int, vocab_size: int, token_ids: Tensor | None = None
    ) -> "PackedDrafts":
        """Pack B plans.

        Args:
            plans: the plans.
            num_columns: W, columns of the network's logits that are tokens.
            vocab_size: V.
            token_ids: [W] int32 token of each column, ascending. Default None = its index.
        """
        size, depth = len(plans), max(plan.depth for plan in plans)
        ends: list[int] = []
        end_offset, keys, settings = [0], array("q"), array("d")
        for plan in plans:
            ends += plan.end_ids
            end_offset.append(len(ends))
            keys.extend(plan.keys or [0] * plan.depth)
            keys.extend([0] * (depth - plan.depth))
            settings.extend(plan.settings)
        depths, uses_q = [plan.depth for plan in plans], [plan.uses_q for plan in plans]
        numbers = array("i", [*depths, *uses_q, *end_offset, *ends, *[0] * (size * depth + size)])
        q = torch.empty(size, depth + 1, vocab_size) if any(uses_q) else None
        base = numbers.buffer_info()[0]
        tokens = base + 4 * (3 * size + 1 + len(ends))
        record = DraftsRecord(
            settings=settings.buffer_info()[0],
            keys=keys.buffer_info()[0],
            depths=base,
            uses_q=base + 4 * size,
            end_offset=base + 8 * size,
            end_ids=base + 4 * (3 * size + 1),
            token_ids=None if token_ids is None else token_ids.data_ptr(),
            q=None if q is None else q.data_ptr(),
            tokens=tokens,
            counts=tokens + 4 * size * depth,
            margin=RACE_MARGIN,
            num_drafts=size,
            max_depth=depth,
            columns=num_columns,
            vocab=vocab_size,
        )
        return cls(record, numbers, settings, keys, q, size, depth)

    def read(self, status: int) -> DraftTokens | None:
        """Return the tokens after a call with this status; None if rounding decides one of them.

        Raises:
            MemoryError: there was no memory to sample.
        """
        if status == NO_MEMORY:
            raise MemoryError(f"no memory to sample from {self.record.vocab} tokens")
        if status:
            return None
        size, depth = self.num_drafts, self.depth
        found = self.numbers[-size * (depth + 1) :].tolist()
        return DraftTokens([found[b * depth : b * depth + n] for b, n in enumerate(found[-size:])], self.q)
