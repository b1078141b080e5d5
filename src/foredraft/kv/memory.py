"""What a drafter remembers on the target's pages, as far as the memory manager must know of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the manager counts; it never looks at a tensor
    from foredraft.kv.pool import KVPool


@dataclass(eq=False)
class DraftMemory:
    """A drafter's own KV on the target's page ids, and how far it is right.

    Entry t stands at position t of a request's block table. It depends on the committed tokens up to t + lookahead,
    and on nothing else: so two requests with the same tokens may share it, and what either writes there is the same.
    """

    pool: "KVPool"
    bytes_per_token: int = 0
    lookahead: int = 0  # 0: entry t was made from token t; 1: it was made with token t + 1 as well
    is_rereadable: bool = True  # made from tokens alone; otherwise from states that only a pass of the target gives
    settle: Callable[[Sequence[int]], None] = lambda slots: None  # read now what was put off, for these slots
    valid: dict[int, int] = field(default_factory=dict)  # slot -> leading positions whose entry is right


class MemoryOwner(Protocol):
    """Who stands between the memory manager and a drafter, which may fail or be given up at any time."""

    @property
    def memory(self) -> DraftMemory | None:
        """None: nobody drafts, or the drafter keeps nothing on pages."""

    def settle(self, slots: Sequence[int]) -> None:
        """`memory.settle`; raises nothing."""


class NoMemory:
    """No drafter keeps anything on pages."""

    memory: DraftMemory | None = None

    def settle(self, slots: Sequence[int]) -> None:
        """Nothing is put off."""
