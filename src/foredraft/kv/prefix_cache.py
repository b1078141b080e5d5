"""Prefix cache: full pages of committed tokens, looked up by a hash of their tokens. It does not depend on torch.

The hash of a page covers its tokens and the hash of the page before it, so it identifies the whole sequence up to the
end of the page. The hash key is random per cache, and the first hash includes the salt of the request. A client can
therefore neither construct a collision nor detect whether a sequence of another salt is cached.

Draft KV uses the same page ids. For every page the cache records whether its draft KV is valid. If the drafter looks a
token ahead (entry t of EAGLE depends on token t + 1), the last entry of a page depends on the first token after the
page. That token is not part of the hash, so it is recorded too, and has to match at a hit.

A model with recurrent layers can continue only after a token that has a state. A hit then ends with a page that has a
state after its last token. A page without one is replaced by an equal page that has it.

The cache reads requests and changes none: the scheduler puts the pages of a hit into a block table, and empties it.
"""

from dataclasses import dataclass, field

from foredraft.kv.allocator import PageAllocator
from foredraft.kv.draft_kv import DraftKVOwner, NoDraftKV
from foredraft.kv.page_index import PageIndex
from foredraft.kv.state_table import StateTable
from foredraft.request import Request


@dataclass(eq=False)
class CachedPages:
    """Record of the pages of one request, from its first lookup to its end."""

    hashes: list[bytes] = field(default_factory=list)  # hashes of its full pages, each over all tokens up to it
    inserted: set[bytes] = field(default_factory=set)  # hashes of the pages that this request inserted
    num_hit: int = 0  # leading pages that came from the cache; this request did not write them
    num_offered: int = 0  # leading full pages that were offered to the cache
    num_with_draft_kv: int = 0  # leading ones of them whose valid draft KV was recorded


@dataclass(frozen=True)
class PrefixHit:
    """Cached pages that hold the first tokens of a request."""

    pages: tuple[int, ...] = ()
    num_draft_pages: int = 0  # leading ones of them with valid draft KV


NO_HIT = PrefixHit()


class PrefixCache:
    """Index of full pages by hash. Every page in it is cacheable and holds only committed tokens.

    Args:
        allocator: allocator of the pages; the index of the cache sets its `on_evict`.
        draft_kv_owner: access to the draft KV. Default None = no draft KV.
        is_shared: False drops the pages of a request when it ends, unless another request holds them. Samples of one
            prompt still share pages while they run. Default True.
        is_active: False disables all hits. Default True.
        states: recurrent states of the target by position. Default None = no recurrent layer.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        draft_kv_owner: DraftKVOwner | None = None,
        is_shared: bool = True,
        is_active: bool = True,
        states: StateTable | None = None,
    ) -> None:
        self.allocator = allocator
        self.draft_kv_owner: DraftKVOwner = NoDraftKV() if draft_kv_owner is None else draft_kv_owner
        self.is_shared = is_shared
        self.is_active = is_active
        self._index = PageIndex(allocator, states)
        self._cached_pages: dict[Request, CachedPages] = {}  # requests that were looked up or inserted

    @property
    def has_draft_kv(self) -> bool:
        """True if the drafter has KV on pages."""
        return self.draft_kv_owner.draft_kv is not None

    def match(self, request: Request) -> PrefixHit:
        """Return the longest hit that leaves at least the last token to compute. Page states do not change."""
        pages = self._look_up(request)
        if not pages:
            return NO_HIT
        draft_kv = self.draft_kv_owner.draft_kv
        if draft_kv is None:
            return PrefixHit(tuple(pages))
        writers = self._index.find_unrecorded_writers(pages)
        for writer in writers:
            self._record_draft_kv(writer, self._cached_pages[writer])
        if writers:  # a page with draft KV may have replaced an equal one
            pages = self._look_up(request)
        num_draft_pages = self._index.count_draft_pages(request, pages, draft_kv)
        # If draft KV cannot be rebuilt from tokens, a longer hit would leave a gap, and the request could never draft.
        can_leave_gap = draft_kv.is_rebuildable_from_tokens or draft_kv.is_resting
        usable = pages if can_leave_gap else pages[:num_draft_pages]
        return PrefixHit(tuple(usable), num_draft_pages)

    def find_unrecorded_slots(self, request: Request) -> list[int]:
        """Return the slots of running requests that filled pages of the request's prefix and deferred their draft KV.

        `match` counts the draft KV of these pages only if the drafter has written it.
        """
        return [writer.slot for writer in self._index.find_unrecorded_writers(self._look_up(request))]

    def acquire(self, request: Request, hit: PrefixHit) -> None:
        """Hold the pages of a hit for a request that starts. Its draft KV is valid as far as the hit's."""
        if not hit.pages:
            return
        self.allocator.acquire(hit.pages)
        cached = self._cached_pages[request]
        cached.num_offered = cached.num_hit = len(hit.pages)
        draft_kv = self.draft_kv_owner.draft_kv
        if draft_kv is not None and hit.num_draft_pages:
            draft_kv.num_valid[request.slot] = hit.num_draft_pages * self.allocator.page_size
            cached.num_with_draft_kv = hit.num_draft_pages

    def insert(self, request: Request) -> None:
        """Insert the pages that the request has filled with committed tokens. Of equal pages the first one stays."""
        if not self.is_active:
            return
        num_full = request.num_computed // self.allocator.page_size
        cached = self._extend_hashes(request, num_full)
        for i in range(cached.num_offered, num_full):
            digest = cached.hashes[i]
            if not self._index.holds_equal(digest, request.pages[i]):
                self._add_page(digest, request.pages[i], request)
        cached.num_offered = num_full
        self._record_draft_kv(request, cached)

    def keeps_pages(self, request: Request, is_finished: bool) -> bool:
        """Return whether `release` will keep pages of the request, so that its draft KV is worth writing before."""
        cached = self._cached_pages.get(request)
        return cached is not None and cached.num_offered > 0 and (self.is_shared or not is_finished)

    def release(self, request: Request, is_finished: bool, has_invalid_kv: bool = False) -> None:
        """Free the pages of a request. The caller then empties its block table.

        Args:
            request: its pages may be used by other requests afterwards.
            is_finished: the request has ended; otherwise it was preempted.
            has_invalid_kv: the request produced invalid logits: drop every page that it inserted, or holds alone.
        """
        cached = self._cached_pages.get(request)
        if cached is None:  # no page is full, or the cache is not active
            self.allocator.free(request.pages)
            return
        if has_invalid_kv:
            self._drop_invalid(request, cached)
        elif is_finished and not self.is_shared:
            self._drop_unshared(request)
        elif cached.num_offered:
            self._record_draft_kv(request, cached)
            self._reinsert_pages(request, cached)
        self._free_pages(request, cached)
        cached.num_hit = cached.num_offered = cached.num_with_draft_kv = 0

    def forget(self, request: Request) -> None:
        """Drop what is kept about a request that has ended. Its pages stay."""
        self._cached_pages.pop(request, None)

    def clear(self) -> None:
        """Drop all entries and free all pages. The caller must empty all block tables."""
        self._index.clear()
        self._cached_pages.clear()
        self.allocator.reset()

    def check_integrity(self) -> None:
        """Assert that the tables agree with each other and with the allocator."""
        self._index.check_integrity()

    def _look_up(self, request: Request) -> list[int]:
        """Return the indexed pages of the request's longest prefix, without the page of its last token."""
        # prompt_logprobs need every prompt row
        if not self.is_active or request.spec.sampling.prompt_logprobs is not None:
            return []
        max_pages = (request.num_tokens - 1) // self.allocator.page_size
        pages: list[int] = []
        for digest in self._extend_hashes(request, max_pages).hashes[:max_pages]:
            page = self._index.page_by_hash.get(digest)
            if page is None:
                break
            pages.append(page)
        return self._index.cut_to_state(pages)

    def _extend_hashes(self, request: Request, num_pages: int) -> CachedPages:
        """Compute the missing hashes of the request's first `num_pages` pages."""
        cached = self._cached_pages.get(request)
        if cached is None:
            cached = self._cached_pages[request] = CachedPages()
        self._index.extend_hashes(cached.hashes, request, num_pages)
        return cached

    def _add_page(self, digest: bytes, page: int, writer: Request) -> None:
        self._index.add(digest, page, writer)
        self._cached_pages[writer].inserted.add(digest)

    def _record_draft_kv(self, request: Request, cached: CachedPages) -> None:
        """Record the request's pages whose draft KV has become valid."""
        draft_kv = self.draft_kv_owner.draft_kv
        if draft_kv is None:
            return
        num_valid_pages = draft_kv.num_valid.get(request.slot, 0) // self.allocator.page_size
        for i in range(cached.num_with_draft_kv, min(num_valid_pages, cached.num_offered)):
            page, digest = request.pages[i], cached.hashes[i]
            indexed = self._index.page_by_hash.get(digest)
            if indexed is not None and indexed != page and indexed not in self._index.next_token_by_page:
                # An equal page without valid draft KV is replaced by this one.
                self._index.drop(indexed)
                self._add_page(digest, page, request)
                indexed = page
            if indexed == page:
                self._index.record_draft_kv(page, request, i, draft_kv)
            cached.num_with_draft_kv = i + 1

    def _reinsert_pages(self, request: Request, cached: CachedPages) -> None:
        """Index the request's own pages again if the equal pages in the index have been evicted since.

        Pages that came from a hit need no check: they stay indexed while they are held, unless their writer failed.
        """
        for i in range(cached.num_hit, cached.num_offered):
            if cached.hashes[i] not in self._index.page_by_hash:
                self._add_page(cached.hashes[i], request.pages[i], request)

    def _drop_invalid(self, request: Request, cached: CachedPages) -> None:
        for digest in cached.inserted:
            if digest in self._index.page_by_hash:
                self._index.drop(self._index.page_by_hash[digest])
        self._drop_unshared(request)

    def _drop_unshared(self, request: Request) -> None:
        for page in request.pages:
            if page in self._index.hash_by_page and self.allocator.num_holders(page) == 1:
                self._index.drop(page)

    def _free_pages(self, request: Request, cached: CachedPages) -> None:
        """Free the pages from the end, so that the end of a sequence is evicted before its beginning."""
        for i in reversed(range(len(request.pages))):
            page = request.pages[i]
            if self._index.writers.get(page) is request:
                del self._index.writers[page]
            self.allocator.free([page])
            if i < cached.num_offered:
                indexed = self._index.page_by_hash.get(cached.hashes[i], page)
                if indexed != page:
                    self.allocator.touch(indexed)
