"""Combination of several drafters' KV caches on the same pages into one DraftKV.

A draft KV that cannot be rebuilt from tokens limits a prefix-cache hit to its valid positions. A rebuildable draft KV
is ignored for the limit, unless all are rebuildable; then a position is valid if it is valid in all of them.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, cast

from foredraft.kernels.gpu.graphs import GraphMemory
from foredraft.kv.draft_kv import DraftKV

if TYPE_CHECKING:
    from foredraft.kv.pool import KVPool
    from foredraft.kv.state_pool import StatePool


class CombinedNumValid(MutableMapping[int, int]):
    """Mapping of slot -> leading positions valid in all of several draft KVs. A write goes to each of them."""

    def __init__(self, draft_kvs: Sequence[DraftKV]) -> None:
        self._draft_kvs = draft_kvs

    def __getitem__(self, slot: int) -> int:
        return min(draft_kv.num_valid[slot] for draft_kv in self._draft_kvs)

    def __setitem__(self, slot: int, count: int) -> None:
        for draft_kv in self._draft_kvs:
            draft_kv.num_valid[slot] = count

    def __delitem__(self, slot: int) -> None:
        for draft_kv in self._draft_kvs:
            draft_kv.num_valid.pop(slot, None)

    def __iter__(self) -> Iterator[int]:
        return (
            slot
            for slot in self._draft_kvs[0].num_valid
            if all(slot in draft_kv.num_valid for draft_kv in self._draft_kvs)
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


class CombinedPool:
    """The subset of KVPool that page accounting uses, its limits, states and clear, over several pools."""

    def __init__(self, draft_kvs: Sequence[DraftKV]) -> None:
        self._pools = [draft_kv.pool for draft_kv in draft_kvs]

    @property
    def capacity(self) -> int | None:
        return self._pools[0].capacity

    @capacity.setter
    def capacity(self, slots: int | None) -> None:
        for pool in self._pools:
            pool.capacity = slots

    @property
    def graph_memory(self) -> GraphMemory | None:
        return self._pools[0].graph_memory

    @graph_memory.setter
    def graph_memory(self, memory: GraphMemory | None) -> None:
        for pool in self._pools:
            pool.graph_memory = memory

    @property
    def state_pools(self) -> tuple["StatePool", ...]:
        return tuple(states for pool in self._pools for states in pool.state_pools)

    def clear(self) -> None:
        for pool in self._pools:
            pool.clear()


def combine_draft_kv(draft_kvs: Sequence[DraftKV]) -> DraftKV | None:
    """Combine the draft KVs of several drafters; None without any."""
    if len(draft_kvs) < 2:
        return draft_kvs[0] if draft_kvs else None
    limiting = [draft_kv for draft_kv in draft_kvs if not draft_kv.is_rebuildable_from_tokens] or list(draft_kvs)

    def flush(slots: Sequence[int]) -> None:
        for draft_kv in draft_kvs:
            draft_kv.flush(slots)

    return DraftKV(
        cast("KVPool", CombinedPool(draft_kvs)),
        sum(draft_kv.bytes_per_token for draft_kv in draft_kvs),
        max(draft_kv.token_lookahead for draft_kv in limiting),
        all(draft_kv.is_rebuildable_from_tokens for draft_kv in draft_kvs),
        flush,
        cast(dict[int, int], CombinedNumValid(limiting)),
    )
