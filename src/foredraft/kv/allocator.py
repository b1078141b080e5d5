"""Allocator of page ids: one id space for the KV pools of target and drafter. It does not depend on torch."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

NULL_PAGE = 0  # page that padding refers to: never allocated, never written


class OutOfPagesError(Exception):
    """Error for a request that needs more pages than are available; the scheduler then preempts another request."""


class PageAllocator:
    """Allocates page ids, lowest first, so that the pages of a single request are contiguous.

    A page is free, used (in one or more block tables) or cached. A cached page is in no block table; its content stays
    until the page is needed. Invariants: every page except the null page is in exactly one of these states, and the
    holder count of a used page equals the number of block tables that contain it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is the null page), got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict: Callable[[int], None] = lambda page: None  # called before a cached page is freed for another use
        self.on_free: Callable[[int], None] | None = None  # called after a page has become free; None = not called
        self.reset()

    def reset(self) -> None:
        """Free every page. The caller must empty all block tables."""
        self._free = list(range(1, self.num_pages))  # heap
        self._num_holders = [0] * self.num_pages  # number of block tables that contain each page
        self._cacheable: set[int] = set()  # pages that become cached, not free, without a holder
        self._cached: dict[int, None] = {}  # cached pages, least recently used first

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of cached pages."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Number of pages in block tables."""
        return self.num_pages - 1 - self.num_available

    def num_holders(self, page: int) -> int:
        """Return the number of block tables that contain a page."""
        return self._num_holders[page]

    def count_freed(self, tables: Sequence[Sequence[int]]) -> int:
        """Return the number of pages that become available if all these block tables are freed."""
        counts = Counter(page for table in tables for page in table)
        return sum(self._num_holders[page] == count for page, count in counts.items())

    def is_in_use(self, page: int) -> bool:
        """Whether a page is used or cached."""
        return self._num_holders[page] > 0 or page in self._cached

    def is_cacheable(self, page: int) -> bool:
        """Whether a page becomes cached when its last holder frees it."""
        return page in self._cacheable

    def count_pages(self, length: int) -> int:
        """Return the number of pages that hold `length` tokens."""
        return -(-length // self.page_size)

    def grow(self, pages: list[int], length: int) -> None:
        """Extend a block table in place until it holds `length` tokens.

        Raises:
            OutOfPagesError: if too few pages are available; nothing is changed.
        """
        missing = -(-length // self.page_size) - len(pages)
        if missing <= 0:
            return
        if missing > self.num_available:
            raise OutOfPagesError(f"{missing} pages wanted, {self.num_available} free")
        for _ in range(missing - len(self._free)):
            self._evict()
        for _ in range(missing):
            page = heapq.heappop(self._free)
            self._num_holders[page] = 1
            pages.append(page)

    def shrink(self, pages: list[int], length: int) -> None:
        """Free the pages of a block table after `length` tokens, such as those reserved for rejected draft nodes."""
        num_needed = -(-length // self.page_size)
        if len(pages) > num_needed:
            self.free(pages[num_needed:])
            del pages[num_needed:]

    def free(self, pages: Sequence[int]) -> None:
        """Remove one holder from each page. The last pages of the list are evicted first.

        Raises:
            ValueError: if a page is not in use.
        """
        for page in reversed(pages):
            holders = self._num_holders[page]
            if not holders:
                raise ValueError(f"page {page} is not in use")
            self._num_holders[page] = holders - 1
            if holders == 1:
                if page in self._cacheable:
                    self._cached[page] = None
                else:
                    self._put_free(page)

    def acquire(self, pages: Sequence[int]) -> None:
        """Add one holder to each of these cacheable pages.

        Raises:
            ValueError: if a page is not cacheable.
        """
        for page in pages:
            if page not in self._cacheable:
                raise ValueError(f"page {page} is not cacheable")
            self._cached.pop(page, None)
            self._num_holders[page] += 1

    def mark_cacheable(self, page: int) -> None:
        """Mark a used page, so that it becomes cached when its last holder frees it. Raises ValueError if unused."""
        if not self._num_holders[page]:
            raise ValueError(f"page {page} is not in use")
        self._cacheable.add(page)

    def discard(self, page: int) -> None:
        """Drop the content of a page: a cached page becomes free, a used page is no longer cacheable."""
        self._cacheable.discard(page)
        if page in self._cached:
            del self._cached[page]
            self._put_free(page)

    def touch(self, page: int) -> None:
        """Mark a cached page as most recently used."""
        if page in self._cached:
            del self._cached[page]
            self._cached[page] = None

    def _put_free(self, page: int) -> None:
        heapq.heappush(self._free, page)
        if self.on_free is not None:
            self.on_free(page)

    def _evict(self) -> None:
        page = next(iter(self._cached))
        self.on_evict(page)
        self.discard(page)

    def check_writable(self, pages: Sequence[int]) -> None:
        """Assert that pages which will be written are neither shared nor in the prefix cache."""
        for page in pages:
            assert self.num_holders(page) == 1, "a page that is written to is held by two requests"
            assert not self.is_cacheable(page), "a page that is written to is in the prefix cache"

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert the invariant against the block tables of every running request."""
        table_counts = Counter(page for table in tables for page in table)
        used = {page for page, holders in enumerate(self._num_holders) if holders}
        free, cached = set(self._free), set(self._cached)
        assert set(table_counts) == used, "a used page is in no block table, or the reverse"
        assert all(self._num_holders[page] == count for page, count in table_counts.items()), (
            "a page has a wrong count of holders"
        )
        assert all(len(set(table)) == len(table) for table in tables), "a page is twice in one block table"
        assert len(free) == len(self._free), "a page is free twice"
        assert len(used | free | cached) == len(used) + len(free) + len(cached), "a page has two states"
        assert len(free) + len(cached) + len(used) + 1 == self.num_pages, "pages were lost"
        assert cached <= self._cacheable <= cached | used, "a cached page is not cacheable, or a free page is"
        assert NULL_PAGE not in used | cached | free, "the null page was handed out"
