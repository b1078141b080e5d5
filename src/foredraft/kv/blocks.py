"""Page ids: one id space for every pool. This file has never seen a tensor."""

import heapq
from collections.abc import Iterable, Sequence

NULL_PAGE = 0  # what padding points to: never handed out, never written


class OutOfPagesError(Exception):
    """No page is free; the scheduler preempts and tries again."""


class PageAllocator:
    """Hands out page ids, lowest first, so that a lone request's pages are contiguous.

    Invariant: free + used + the null page == all pages, and no page is in two places.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is the null page), got {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(1, num_pages))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def pages_for(self, length: int) -> int:
        """Pages that hold `length` tokens."""
        return -(-length // self.page_size)

    def grow(self, pages: list[int], length: int) -> None:
        """Extend a block table until it holds `length` tokens. Raises OutOfPagesError, and then changes nothing."""
        missing = self.pages_for(length) - len(pages)
        if missing > len(self._free):
            raise OutOfPagesError(f"{missing} pages wanted, {len(self._free)} free")
        for _ in range(missing):
            page = heapq.heappop(self._free)
            self._used.add(page)
            pages.append(page)

    def shrink(self, pages: list[int], length: int) -> None:
        """Give back the pages beyond `length` tokens: speculative slots that nothing was committed to."""
        keep = self.pages_for(length)
        self.free(pages[keep:])
        del pages[keep:]

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page not in self._used:
                raise ValueError(f"page {page} is not in use")
            self._used.remove(page)
            heapq.heappush(self._free, page)

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Assert the invariant against the block tables of every running request."""
        held = [page for table in tables for page in table]
        assert len(held) == len(set(held)), "a page is in two block tables"
        assert set(held) == self._used, "a used page is in no block table, or the reverse"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not self._used & set(self._free), "a page is free and used"
        assert len(self._free) + len(self._used) + 1 == self.num_pages, "pages were lost"
        assert NULL_PAGE not in self._used, "the null page was handed out"
