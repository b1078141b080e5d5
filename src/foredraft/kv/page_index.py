"""Index of full pages by a hash of their tokens and of all tokens before them."""

import os
from array import array
from hashlib import blake2b

from foredraft.kv.allocator import PageAllocator
from foredraft.request import Request

HASH_BYTES = 16
ANY_NEXT_TOKEN = -1  # recorded if the draft KV of a page does not depend on the token after it


class PageIndex:
    """Tables of the pages that a prefix cache can find. The key of the hashes is random per index."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self.page_by_hash: dict[bytes, int] = {}
        self.hash_by_page: dict[int, bytes] = {}
        self.next_token_by_page: dict[int, int] = {}  # page with valid draft KV -> next token, or ANY_NEXT_TOKEN
        self.writers: dict[int, Request] = {}  # page -> running request that filled it

    def extend_hashes(self, hashes: list[bytes], request: Request, num_pages: int, page_size: int) -> None:
        """Append the missing hashes of the request's first `num_pages` pages to `hashes`."""
        if len(hashes) >= num_pages:
            return
        last = hashes[-1] if hashes else blake2b(request.salt, key=self._key, digest_size=HASH_BYTES).digest()
        for i in range(len(hashes), num_pages):
            tokens = array("q", request.get_tokens(i * page_size, (i + 1) * page_size)).tobytes()
            last = blake2b(last + tokens, key=self._key, digest_size=HASH_BYTES).digest()
            hashes.append(last)

    def add(self, digest: bytes, page: int, writer: Request) -> None:
        """Add a page that `writer` has filled."""
        self.page_by_hash[digest] = page
        self.hash_by_page[page] = digest
        self.writers[page] = writer

    def forget(self, page: int) -> None:
        """Remove a page."""
        del self.page_by_hash[self.hash_by_page.pop(page)]
        self.next_token_by_page.pop(page, None)
        self.writers.pop(page, None)

    def clear(self) -> None:
        """Remove all pages."""
        for table in (self.page_by_hash, self.hash_by_page, self.next_token_by_page, self.writers):
            table.clear()

    def check_integrity(self, allocator: PageAllocator) -> None:
        """Assert that the tables agree with each other and with the allocator."""
        hash_by_page = {page: digest for digest, page in self.page_by_hash.items()}
        assert hash_by_page == self.hash_by_page, "a page has two hashes"
        assert all(map(allocator.is_cacheable, self.hash_by_page)), "an indexed page is not cacheable"
        assert self.next_token_by_page.keys() <= self.hash_by_page.keys(), (
            "draft KV is recorded for a page that is not indexed"
        )
        assert self.writers.keys() <= self.hash_by_page.keys(), "a writer is recorded for a page that is not indexed"
