"""Page ids: one id space for every pool. This file has never seen a tensor."""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

NULL_PAGE = 0  # what padding points to: never handed out, never written


class OutOfPagesError(Exception):
    """No page is free; the scheduler preempts and tries again."""


class PageAllocator:
    """Hands out page ids, lowest first, so that a lone request's pages are contiguous.

    A page is free; or used, held by one or more block tables; or cached: held by none, and kept for what is written in
    it until the memory is needed. Invariant: free + cached + used + the null page == all pages, no page is in two of
    these, and every used page is counted as often as it stands in block tables.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is the null page), got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.evicted: Callable[[int], None] = lambda page: None  # told before a cached page is given to someone else
        self.reset()

    def reset(self) -> None:
        """Every page is free, whatever the block tables say: they must be emptied too."""
        self._free = list(range(1, self.num_pages))
        self._holders = [0] * self.num_pages  # block tables that hold each page
        self._kept: set[int] = set()  # pages that are to be cached rather than freed
        self._cached: dict[int, None] = {}  # kept pages that nobody holds, least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that could be handed out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_available

    def num_holders(self, page: int) -> int:
        return self._holders[page]

    def is_kept(self, page: int) -> bool:
        return page in self._kept

    def pages_for(self, length: int) -> int:
        """Pages that hold `length` tokens."""
        return -(-length // self.page_size)

    def grow(self, pages: list[int], length: int) -> None:
        """Extend a block table until it holds `length` tokens. Raises OutOfPagesError, and then changes nothing."""
        missing = -(-length // self.page_size) - len(pages)
        if missing <= 0:
            return
        if missing > self.num_available:
            raise OutOfPagesError(f"{missing} pages wanted, {self.num_available} free")
        for _ in range(missing - len(self._free)):
            self._evict()
        for _ in range(missing):
            page = heapq.heappop(self._free)
            self._holders[page] = 1
            pages.append(page)

    def shrink(self, pages: list[int], length: int) -> None:
        """Give back the pages beyond `length` tokens: speculative slots that nothing was committed to."""
        keep = -(-length // self.page_size)
        if len(pages) > keep:
            self.free(pages[keep:])
            del pages[keep:]

    def free(self, pages: Sequence[int]) -> None:
        """A block table lets go of pages; the last ones count as used longest ago."""
        for page in reversed(pages):
            holders = self._holders[page]
            if not holders:
                raise ValueError(f"page {page} is not in use")
            self._holders[page] = holders - 1
            if holders == 1:
                if page in self._kept:
                    self._cached[page] = None
                else:
                    heapq.heappush(self._free, page)

    def hold(self, pages: Sequence[int]) -> None:
        """Another block table holds these kept pages. Raises ValueError for one that is not kept."""
        for page in pages:
            if page not in self._kept:
                raise ValueError(f"page {page} is not kept")
            self._cached.pop(page, None)
            self._holders[page] += 1

    def keep(self, page: int) -> None:
        """Cache a used page when nobody holds it any more."""
        if not self._holders[page]:
            raise ValueError(f"page {page} is not in use")
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """What is written in a page is of no use any more."""
        self._kept.discard(page)
        if page in self._cached:
            del self._cached[page]
            heapq.heappush(self._free, page)

    def touch(self, page: int) -> None:
        """A cached page was used just now."""
        if page in self._cached:
            del self._cached[page]
            self._cached[page] = None

    def _evict(self) -> None:
        page = next(iter(self._cached))
        self.evicted(page)
        self.drop(page)

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert the invariant against the block tables of every running request."""
        held = Counter(page for table in tables for page in table)
        used = {page for page, holders in enumerate(self._holders) if holders}
        free, cached = set(self._free), set(self._cached)
        assert set(held) == used, "a used page is in no block table, or the reverse"
        assert all(self._holders[page] == count for page, count in held.items()), "a page has a wrong count of holders"
        assert all(len(set(table)) == len(table) for table in tables), "a page is twice in one block table"
        assert len(free) == len(self._free), "a page is free twice"
        assert len(used | free | cached) == len(used) + len(free) + len(cached), "a page is in two places"
        assert len(free) + len(cached) + len(used) + 1 == self.num_pages, "pages were lost"
        assert cached <= self._kept <= cached | used, "a page is cached for nothing, or free with something to keep"
        assert NULL_PAGE not in used | cached | free, "the null page was handed out"
