"""Recurrent states of target and drafter, as far as pages and requests decide about them."""

from collections.abc import Iterable, Iterator

from foredraft.kv.allocator import PageAllocator
from foredraft.kv.draft_kv import DraftKVOwner
from foredraft.kv.pool import KVPool
from foredraft.kv.state_pool import StatePool
from foredraft.kv.weak import bind_weakly
from foredraft.request import Request


class StateMemory:
    """Frees states with their pages, and bounds those that are kept for the prefix cache.

    The passes allocate states, and the commit of a step frees those of rejected nodes (`StateTable`).
    """

    def __init__(self, allocator: PageAllocator, target_pool: KVPool, draft_kv_owner: DraftKVOwner) -> None:
        """Follow the pages of an allocator.

        Args:
            allocator: allocator of the pages; its `on_free` is set if the target or the drafter has states.
            target_pool: KV pool of the target.
            draft_kv_owner: access to the draft KV.
        """
        self.allocator = allocator
        self.target_pool = target_pool
        self.draft_kv_owner = draft_kv_owner
        if any(self._iterate_pools()):
            allocator.on_free = bind_weakly(self.drop_page)

    def drop_page(self, page: int) -> None:
        """Free the states of a page that became free."""
        for pool in self._iterate_pools():
            pool.drop_page(page)

    def trim(self, running: Iterable[Request]) -> None:
        """Free the least recently used states after page ends, as far as they exceed the bound of their pool.

        Args:
            running: running requests, which continue after the last page that they have filled.
        """
        size = self.allocator.page_size
        for pool in self._iterate_pools():
            table = pool.get_table(size)
            if table.num_page_ends > pool.max_page_ends:
                kept = [r.pages[(r.num_computed - 1) // size] for r in running if r.num_computed]
                table.trim(pool.max_page_ends, kept)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Assert the invariants of all states, given the running requests."""
        size = self.allocator.page_size
        for pool in self.target_pool.state_pools:
            pool.get_table(size).check_integrity([(r.pages, r.num_computed) for r in running])
        for pool in self._iterate_pools():
            table = pool.get_table(size)
            table.check_ids()
            pool.check_null_state()
            for page in table.list_pages():
                assert self.allocator.is_in_use(page), "a free page has a recurrent state"

    def _iterate_pools(self) -> Iterator[StatePool]:
        yield from self.target_pool.state_pools
        draft_kv = self.draft_kv_owner.draft_kv
        if draft_kv is not None:
            yield from draft_kv.pool.state_pools
