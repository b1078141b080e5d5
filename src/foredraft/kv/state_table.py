"""Ids of recurrent states by the position of the token after which they stand. It does not depend on torch.

A recurrent layer has no entry per token, but one state after each token. The state after the token at a position has
the address of that token's KV: a page and an offset. So states live as long as pages do, follow an accepted path, and
are shared with the page. Few tokens have one: the last computed token, the nodes of a draft, and the ends of pages.
"""

from collections.abc import Iterable, Sequence

from foredraft.kv.allocator import NULL_PAGE

NULL_STATE = 0  # the state before the first token: zeros, never allocated, never written


class StateTable:
    """Allocates state ids to positions of block tables.

    Every id except the null state is free, or belongs to one position of one page. A state is written once, by the pass
    that allocates its id, and read by the passes after it.
    """

    def __init__(self, page_size: int) -> None:
        """Begin without a state.

        Args:
            page_size: tokens per page.
        """
        self.page_size = page_size
        self.clear()

    def clear(self) -> None:
        """Free all states."""
        self.num_ids = 1  # ids that exist, the null state included
        self._free: list[int] = []
        self._by_page: dict[int, dict[int, int]] = {}  # page -> offset -> state id
        # Pages with a state before their last token, and the index that they have in every block table with them.
        self._inner_pages: dict[int, int] = {}
        self._page_ends: dict[int, None] = {}  # pages with a state after their last token, least recently used first

    @property
    def num_used(self) -> int:
        """Number of states that belong to a position."""
        return self.num_ids - 1 - len(self._free)

    @property
    def num_page_ends(self) -> int:
        """Number of states after the last token of a page."""
        return len(self._page_ends)

    def find(self, pages: Sequence[int], length: int) -> int | None:
        """Return the id of the state after the first `length` tokens of a block table; None if there is none."""
        state = self._look_up(pages, length)
        if state and length % self.page_size == 0:
            self._touch(pages[length // self.page_size - 1])
        return state

    def has_page_end(self, page: int) -> bool:
        """Whether there is a state after the last token of a page."""
        return page in self._page_ends

    def find_last_valid(self, pages: Sequence[int], length: int) -> int:
        """Return the largest number of tokens, at most `length`, after which there is a state."""
        if self.find(pages, length) is not None:
            return length
        ends = (i for i in reversed(range(length // self.page_size)) if self.has_page_end(pages[i]))
        return (next(ends, -1) + 1) * self.page_size

    def add(self, pages: Sequence[int], position: int) -> int:
        """Allocate the state after the token at a position, in place of one that stands there."""
        page, offset = self._locate(pages, position)
        self._drop(page, offset)
        if self._free:
            state = self._free.pop()
        else:
            state, self.num_ids = self.num_ids, self.num_ids + 1
        self._put(pages, position, state)
        return state

    def rewind(self, pages: Sequence[int], length: int) -> None:
        """Free the states of a block table that its first `length` tokens do not need.

        The states after these tokens, and after the last token of every page of them, stay.
        """
        for page in pages[length // self.page_size :]:
            self._drop(page, self.page_size - 1)
        for page, i in list(self._inner_pages.items()):
            if i < len(pages) and pages[i] == page:
                for offset in list(self._by_page[page]):
                    if offset != self.page_size - 1 and i * self.page_size + offset + 1 != length:
                        self._drop(page, offset)

    def commit(self, pages: Sequence[int], start: int, path: Sequence[int]) -> None:
        """Keep the states of an accepted path: after its last node, and after nodes that end a page.

        Args:
            pages: block table.
            start: position of node 0.
            path: accepted nodes. Node n has the state of position start + n, and becomes that of start + index.
        """
        kept: dict[int, int] = {}
        for i, node in enumerate(path):
            if i == len(path) - 1 or (start + i + 1) % self.page_size == 0:
                page, offset = self._locate(pages, start + node)
                state = self._take(page, offset)
                if state is not None:
                    kept[start + i] = state
        self.rewind(pages, start)
        for position, state in kept.items():
            self._drop(*self._locate(pages, position))
            self._put(pages, position, state)
        self.rewind(pages, start + len(path))

    def drop_page(self, page: int) -> None:
        """Free all states of a page."""
        for offset in list(self._by_page.get(page, ())):
            self._drop(page, offset)

    def trim(self, max_page_ends: int, kept_pages: Iterable[int] = ()) -> None:
        """Free the states of the least recently used page ends beyond a number.

        Args:
            max_page_ends: states after page ends that may stay.
            kept_pages: pages whose states stay in any case.
        """
        if len(self._page_ends) <= max_page_ends:
            return
        kept = set(kept_pages)
        for page in [page for page in self._page_ends if page not in kept]:
            if len(self._page_ends) <= max_page_ends:
                return
            self._drop(page, self.page_size - 1)

    def check_integrity(self, tables: Sequence[tuple[Sequence[int], int]]) -> None:
        """Assert that exactly the states exist which requests and page ends need.

        Args:
            tables: block table and number of computed tokens of every running request.
        """
        expected = {(page, self.page_size - 1) for page in self._page_ends}
        for pages, length in tables:
            assert self._look_up(pages, length) is not None, "a request has no state after its computed tokens"
            if length:
                expected.add(self._locate(pages, length - 1))
        found = {(page, offset) for page, states in self._by_page.items() for offset in states}
        assert found == expected, "a state is kept that no request and no page end needs"

    def check_ids(self) -> None:
        """Assert that every id is free or belongs to one position."""
        used = [state for states in self._by_page.values() for state in states.values()]
        assert len(set(used)) == len(used), "a state belongs to two positions"
        assert sorted([*used, *self._free]) == list(range(1, self.num_ids)), "states were lost, or are used and free"
        assert NULL_PAGE not in self._by_page, "the null page has a state"
        ends = {page for page, states in self._by_page.items() if self.page_size - 1 in states}
        assert ends == set(self._page_ends), "the states of page ends are not those in the table"

    def list_pages(self) -> list[int]:
        """List the pages that have states."""
        return list(self._by_page)

    def _look_up(self, pages: Sequence[int], length: int) -> int | None:
        if not length:
            return NULL_STATE
        page, offset = self._locate(pages, length - 1)
        return self._by_page.get(page, {}).get(offset)

    def _locate(self, pages: Sequence[int], position: int) -> tuple[int, int]:
        return pages[position // self.page_size], position % self.page_size

    def _put(self, pages: Sequence[int], position: int, state: int) -> None:
        page, offset = self._locate(pages, position)
        self._by_page.setdefault(page, {})[offset] = state
        if offset == self.page_size - 1:
            self._touch(page)
        else:
            self._inner_pages[page] = position // self.page_size

    def _touch(self, page: int) -> None:
        self._page_ends.pop(page, None)
        self._page_ends[page] = None

    def _take(self, page: int, offset: int) -> int | None:
        """Remove the state of a position from the table, without freeing it."""
        states = self._by_page.get(page)
        state = None if states is None else states.pop(offset, None)
        if states is None or state is None:
            return None
        if offset == self.page_size - 1:
            del self._page_ends[page]
        if not states.keys() - {self.page_size - 1}:
            self._inner_pages.pop(page, None)
        if not states:
            del self._by_page[page]
        return state

    def _drop(self, page: int, offset: int) -> None:
        state = self._take(page, offset)
        if state is not None:
            self._free.append(state)
