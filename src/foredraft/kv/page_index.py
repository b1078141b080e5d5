"""Index of full pages by a hash of their tokens and of all tokens before them."""

import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from foredraft.kv.allocator import PageAllocator
from foredraft.kv.draft_kv import DraftKV
from foredraft.kv.state_table import StateTable
from foredraft.kv.weak import bind_weakly
from foredraft.request import Request

HASH_BYTES = 16
ANY_NEXT_TOKEN = -1  # recorded if the draft KV of a page does not depend on the token after it


class PageIndex:
    """Tables of the pages that a prefix cache can find. The key of the hashes is random per index."""

    def __init__(self, allocator: PageAllocator, states: StateTable | None = None) -> None:
        """Begin without a page.

        Args:
            allocator: allocator of the pages; the index sets its `on_evict`.
            states: recurrent states of the target by position. Default None = no recurrent layer.
        """
        self.allocator = allocator
        self.states = states
        self._key = os.urandom(32)
        self.page_by_hash: dict[bytes, int] = {}
        self.hash_by_page: dict[int, bytes] = {}
        self.next_token_by_page: dict[int, int] = {}  # page with valid draft KV -> next token, or ANY_NEXT_TOKEN
        self.writers: dict[int, Request] = {}  # page -> running request that filled it
        allocator.on_evict = bind_weakly(self._forget)

    def extend_hashes(self, hashes: list[bytes], request: Request, num_pages: int) -> None:
        """Append the missing hashes of the request's first `num_pages` pages to `hashes`."""
        if len(hashes) >= num_pages:
            return
        page_size = self.allocator.page_size
        salt, images = request.spec.page_salt, request.spec.images
        last = hashes[-1] if hashes else blake2b(salt, key=self._key, digest_size=HASH_BYTES).digest()
        for i in range(len(hashes), num_pages):
            tokens = array("q", request.get_tokens(i * page_size, (i + 1) * page_size)).tobytes()
            if images is not None:
                tokens += images.digest_tokens(i * page_size, (i + 1) * page_size)
            last = blake2b(last + tokens, key=self._key, digest_size=HASH_BYTES).digest()
            hashes.append(last)

    def holds_equal(self, digest: bytes, page: int) -> bool:
        """Return whether a page with these tokens is in the index that serves as well as `page`.

        A page without a recurrent state is removed if `page` has one.
        """
        indexed = self.page_by_hash.get(digest)
        if indexed is None:
            return False
        if self._can_continue(page) and not self._can_continue(indexed):
            self.drop(indexed)
            return False
        return True

    def cut_to_state(self, pages: list[int]) -> list[int]:
        """Return the leading pages up to the last one after which a request can continue."""
        length = next((i for i in range(len(pages), 0, -1) if self._can_continue(pages[i - 1])), 0)
        return pages[:length]

    def add(self, digest: bytes, page: int, writer: Request) -> None:
        """Add a page that `writer` has filled, and make it cacheable."""
        self.page_by_hash[digest] = page
        self.hash_by_page[page] = digest
        self.writers[page] = writer
        self.allocator.mark_cacheable(page)

    def drop(self, page: int) -> None:
        """Remove a page, which then is not cacheable any more."""
        self._forget(page)
        self.allocator.discard(page)

    def find_unrecorded_writers(self, pages: Sequence[int]) -> list[Request]:
        """Return the running requests that filled some of these pages and have no draft KV recorded there."""
        writers = {
            self.writers[page]: None for page in pages if page in self.writers and page not in self.next_token_by_page
        }
        return list(writers)

    def count_draft_pages(self, request: Request, pages: Sequence[int], draft_kv: DraftKV) -> int:
        """Return the number of leading pages of the request's prefix whose draft KV is valid for it."""
        for i, page in enumerate(pages):
            if self.next_token_by_page.get(page) != self._get_next_token(request, i, draft_kv):
                return i
        return len(pages)

    def record_draft_kv(self, page: int, request: Request, i: int, draft_kv: DraftKV) -> None:
        """Record that the draft KV of a page is valid, which is page i of the request."""
        self.next_token_by_page.setdefault(page, self._get_next_token(request, i, draft_kv))

    def clear(self) -> None:
        """Remove all pages."""
        for table in (self.page_by_hash, self.hash_by_page, self.next_token_by_page, self.writers):
            table.clear()

    def check_integrity(self) -> None:
        """Assert that the tables agree with each other and with the allocator."""
        hash_by_page = {page: digest for digest, page in self.page_by_hash.items()}
        assert hash_by_page == self.hash_by_page, "a page has two hashes"
        assert all(map(self.allocator.is_cacheable, self.hash_by_page)), "an indexed page is not cacheable"
        assert self.next_token_by_page.keys() <= self.hash_by_page.keys(), (
            "draft KV is recorded for a page that is not indexed"
        )
        assert self.writers.keys() <= self.hash_by_page.keys(), "a writer is recorded for a page that is not indexed"

    def _can_continue(self, page: int) -> bool:
        return self.states is None or self.states.has_page_end(page)

    def _forget(self, page: int) -> None:
        del self.page_by_hash[self.hash_by_page.pop(page)]
        self.next_token_by_page.pop(page, None)
        self.writers.pop(page, None)

    def _get_next_token(self, request: Request, i: int, draft_kv: DraftKV) -> int:
        """Return the token after page i, if the draft KV of the page depends on it."""
        return request.get_token((i + 1) * self.allocator.page_size) if draft_kv.token_lookahead else ANY_NEXT_TOKEN
