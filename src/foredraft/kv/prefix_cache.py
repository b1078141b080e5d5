"""Prefix cache: full pages of committed tokens, looked up by a hash of their tokens. It does not depend on torch.

The hash of a page covers its tokens and the hash of the page before it, so it identifies the whole sequence up to the
end of the page. The hash key is random per cache, and the first hash includes the salt of the request. A client can
therefore neither construct a collision nor detect whether a sequence of another salt is cached.

Draft KV uses the same page ids. For every page the cache records whether its draft KV is valid. If the drafter looks a
token ahead (entry t of EAGLE depends on token t + 1), the last entry of a page depends on the first token after the
page. That token is not part of the hash, so it is recorded too, and has to match at a hit.
"""

import os
from array import array
from dataclasses import dataclass
from hashlib import blake2b

from foredraft.kv.allocator import PageAllocator
from foredraft.kv.draft_kv import DraftKV, DraftKVOwner, NoDraftKV
from foredraft.kv.weak import bind_weakly
from foredraft.request import Request

HASH_BYTES = 16
ANY_NEXT_TOKEN = -1  # recorded if the draft KV of a page does not depend on the token after it


@dataclass(frozen=True)
class PrefixHit:
    """Cached pages that hold the first tokens of a request."""

    pages: tuple[int, ...] = ()
    num_draft_pages: int = 0  # leading ones of them with valid draft KV


class PrefixCache:
    """Index of full pages by hash. Every page in it is cacheable and holds only committed tokens.

    Args:
        allocator: allocator of the pages; the cache sets its `on_evict`.
        draft_kv_owner: access to the draft KV. Default None = no draft KV.
        is_shared: False drops the pages of a request when it ends, unless another request holds them. Samples of one
            prompt still share pages while they run. Default True.
        is_active: False disables all hits. Default True.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        draft_kv_owner: DraftKVOwner | None = None,
        is_shared: bool = True,
        is_active: bool = True,
    ) -> None:
        self.allocator = allocator
        self.draft_kv_owner: DraftKVOwner = NoDraftKV() if draft_kv_owner is None else draft_kv_owner
        self.is_shared = is_shared
        self.is_active = is_active
        self._key = os.urandom(32)
        self._clear_tables()
        allocator.on_evict = bind_weakly(self._forget_page)

    def match(self, request: Request) -> PrefixHit:
        """Return the longest hit that leaves at least the last token to compute. Page states do not change."""
        if not self.is_active or request.sampling.prompt_logprobs is not None:  # prompt_logprobs need every prompt row
            return PrefixHit()
        max_pages = (request.num_tokens - 1) // self.allocator.page_size
        self._extend_hashes(request, max_pages)
        pages, draft_kv = self._find_pages(request, max_pages), self.draft_kv_owner.draft_kv
        if draft_kv is None or not pages:
            return PrefixHit(tuple(pages))
        if self._flush_writers(pages):
            pages = self._find_pages(request, max_pages)
        num_draft_pages = self._count_draft_pages(request, pages, draft_kv)
        # If draft KV cannot be rebuilt from tokens, a longer hit would leave a gap, and the request could never draft.
        usable = pages if draft_kv.is_rebuildable_from_tokens else pages[:num_draft_pages]
        return PrefixHit(tuple(usable), num_draft_pages)

    def apply_hit(self, request: Request, hit: PrefixHit) -> None:
        """Put the pages of a hit into the empty block table of a request."""
        if not hit.pages:
            return
        size, draft_kv = self.allocator.page_size, self.draft_kv_owner.draft_kv
        self.allocator.acquire(hit.pages)
        request.pages += hit.pages
        request.num_cached_pages = request.num_hit_pages = len(hit.pages)
        request.num_computed = len(hit.pages) * size
        if draft_kv is not None and hit.num_draft_pages:
            draft_kv.num_valid[request.slot] = hit.num_draft_pages * size
            request.num_draft_cached_pages = hit.num_draft_pages

    def insert(self, request: Request) -> None:
        """Insert the pages that the request has filled with committed tokens. Of equal pages the first one stays."""
        if not self.is_active:
            return
        num_full = request.num_computed // self.allocator.page_size
        self._extend_hashes(request, num_full)
        for i in range(request.num_cached_pages, num_full):
            digest = request.page_hashes[i]
            if digest not in self._page_by_hash:
                self._add_page(digest, request.pages[i], request)
        request.num_cached_pages = num_full
        self._record_draft_kv(request)

    def release(self, request: Request, is_finished: bool, has_invalid_kv: bool = False) -> None:
        """Free the pages of a request.

        Args:
            request: its block table is emptied.
            is_finished: the request has ended; otherwise it was preempted.
            has_invalid_kv: the request produced invalid logits: drop every page that it inserted, or holds alone.
        """
        if has_invalid_kv:
            self._drop_invalid(request)
        elif is_finished and not self.is_shared:
            self._drop_unshared(request)
        elif request.num_cached_pages:
            self.draft_kv_owner.flush([request.slot])
            self._record_draft_kv(request)
            self._reinsert_pages(request)
        self._free_pages(request)
        if is_finished:
            request.inserted_hashes.clear()

    def clear(self) -> None:
        """Drop all entries and free all pages. The caller must empty all block tables."""
        self._clear_tables()
        self.allocator.reset()

    def check_integrity(self) -> None:
        """Assert that the tables agree with each other and with the allocator."""
        assert {page: digest for digest, page in self._page_by_hash.items()} == self._hash_by_page, (
            "a page has two hashes"
        )
        assert all(map(self.allocator.is_cacheable, self._hash_by_page)), "an indexed page is not cacheable"
        assert self._next_token_by_page.keys() <= self._hash_by_page.keys(), (
            "draft KV is recorded for a page that is not indexed"
        )
        assert self._writers.keys() <= self._hash_by_page.keys(), "a writer is recorded for a page that is not indexed"

    def _clear_tables(self) -> None:
        self._page_by_hash: dict[bytes, int] = {}
        self._hash_by_page: dict[int, bytes] = {}
        self._next_token_by_page: dict[int, int] = {}  # page with valid draft KV -> next token, or ANY_NEXT_TOKEN
        self._writers: dict[int, Request] = {}  # page -> running request that filled it

    def _extend_hashes(self, request: Request, num_pages: int) -> None:
        """Compute the missing hashes of the request's first `num_pages` pages."""
        hashes, size = request.page_hashes, self.allocator.page_size
        if len(hashes) >= num_pages:
            return
        last = hashes[-1] if hashes else blake2b(request.salt, key=self._key, digest_size=HASH_BYTES).digest()
        for i in range(len(hashes), num_pages):
            tokens = array("q", request.get_tokens(i * size, (i + 1) * size)).tobytes()
            last = blake2b(last + tokens, key=self._key, digest_size=HASH_BYTES).digest()
            hashes.append(last)

    def _add_page(self, digest: bytes, page: int, writer: Request) -> None:
        self._page_by_hash[digest] = page
        self._hash_by_page[page] = digest
        self._writers[page] = writer
        writer.inserted_hashes.add(digest)
        self.allocator.mark_cacheable(page)

    def _drop_page(self, page: int) -> None:
        self._forget_page(page)
        self.allocator.discard(page)

    def _forget_page(self, page: int) -> None:
        del self._page_by_hash[self._hash_by_page.pop(page)]
        self._next_token_by_page.pop(page, None)
        self._writers.pop(page, None)

    def _find_pages(self, request: Request, max_pages: int) -> list[int]:
        """Return the indexed pages of the request's longest prefix, at most `max_pages`."""
        pages: list[int] = []
        for digest in request.page_hashes[:max_pages]:
            page = self._page_by_hash.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def _flush_writers(self, pages: list[int]) -> bool:
        """Flush the deferred draft KV of running requests that filled these pages; return whether there were any."""
        writers = {
            self._writers[page]: None
            for page in pages
            if page in self._writers and page not in self._next_token_by_page
        }
        self.draft_kv_owner.flush([writer.slot for writer in writers])
        for writer in writers:
            self._record_draft_kv(writer)
        return bool(writers)

    def _count_draft_pages(self, request: Request, pages: list[int], draft_kv: DraftKV) -> int:
        """Return the number of leading pages whose draft KV is valid for this request."""
        for i, page in enumerate(pages):
            if self._next_token_by_page.get(page) != self._get_next_token(request, i, draft_kv):
                return i
        return len(pages)

    def _get_next_token(self, request: Request, i: int, draft_kv: DraftKV) -> int:
        return request.get_token((i + 1) * self.allocator.page_size) if draft_kv.token_lookahead else ANY_NEXT_TOKEN

    def _record_draft_kv(self, request: Request) -> None:
        """Record the request's pages whose draft KV has become valid."""
        draft_kv = self.draft_kv_owner.draft_kv
        if draft_kv is None:
            return
        num_valid_pages = draft_kv.num_valid.get(request.slot, 0) // self.allocator.page_size
        for i in range(request.num_draft_cached_pages, min(num_valid_pages, request.num_cached_pages)):
            page, digest = request.pages[i], request.page_hashes[i]
            indexed = self._page_by_hash.get(digest)
            if indexed is not None and indexed != page and indexed not in self._next_token_by_page:
                # An equal page without valid draft KV is replaced by this one.
                self._drop_page(indexed)
                self._add_page(digest, page, request)
                indexed = page
            if indexed == page:
                self._next_token_by_page.setdefault(page, self._get_next_token(request, i, draft_kv))
            request.num_draft_cached_pages = i + 1

    def _reinsert_pages(self, request: Request) -> None:
        """Index the request's own pages again if the equal pages in the index have been evicted since.

        Pages that came from a hit need no check: they stay indexed while they are held, unless their writer failed.
        """
        for i in range(request.num_hit_pages, request.num_cached_pages):
            if request.page_hashes[i] not in self._page_by_hash:
                self._add_page(request.page_hashes[i], request.pages[i], request)

    def _drop_invalid(self, request: Request) -> None:
        for digest in request.inserted_hashes:
            if digest in self._page_by_hash:
                self._drop_page(self._page_by_hash[digest])
        self._drop_unshared(request)

    def _drop_unshared(self, request: Request) -> None:
        for page in request.pages:
            if page in self._hash_by_page and self.allocator.num_holders(page) == 1:
                self._drop_page(page)

    def _free_pages(self, request: Request) -> None:
        """Free the pages from the end, so that the end of a sequence is evicted before its beginning."""
        for i in reversed(range(len(request.pages))):
            page = request.pages[i]
            if self._writers.get(page) is request:
                del self._writers[page]
            self.allocator.free([page])
            if i < request.num_cached_pages:
                indexed = self._page_by_hash.get(request.page_hashes[i], page)
                if indexed != page:
                    self.allocator.touch(indexed)
        request.pages.clear()
        request.num_hit_pages = request.num_cached_pages = request.num_draft_cached_pages = request.num_computed = 0
