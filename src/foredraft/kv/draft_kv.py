"""Draft KV: a drafter's own KV cache on the page ids of the target, as the prefix cache sees it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # this file counts entries and needs no tensors
    from foredraft.kv.pool import KVPool


@dataclass(eq=False)
class DraftKV:
    """KV cache of a drafter that shares the page ids of the target, with its valid length per request.

    Entry t is at position t of a request's block table. It depends only on the committed tokens up to position
    t + token_lookahead. So requests with equal tokens may share a page: both would write the same entries.
    """

    pool: "KVPool"
    bytes_per_token: int = 0
    token_lookahead: int = 0  # 0: entry t depends on tokens up to t (draft model); 1: up to t + 1 (EAGLE)
    # True if entries can be recomputed from tokens; False if they need hidden states of the target.
    is_rebuildable_from_tokens: bool = True
    flush: Callable[[Sequence[int]], None] = lambda slots: None  # write the deferred entries of these slots now
    num_valid: dict[int, int] = field(default_factory=dict)  # slot -> number of leading valid entries
    # Set by the engine while no request drafts: deferred entries are not written, and the prefix cache counts pages
    # without them.
    is_resting: bool = False


class DraftKVOwner(Protocol):
    """Access to the draft KV of a drafter that may fail or be disabled at any time."""

    @property
    def draft_kv(self) -> DraftKV | None:
        """Draft KV; None if there is no drafter, or if the drafter has no KV on pages."""


class NoDraftKV:
    """Owner without draft KV."""

    draft_kv: DraftKV | None = None
