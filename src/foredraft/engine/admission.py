"""Admission of waiting requests: in order, if the pages for all their committed tokens are free."""

from collections.abc import Iterator, Sequence

from foredraft.kv.allocator import PageAllocator
from foredraft.kv.prefix_cache import PrefixCache, PrefixHit
from foredraft.request import Request, RequestStatus

# At admission one page stays free, and one more for every 128 pages of the pool, so that running requests can grow.
MIN_RESERVED_PAGES = 1
RESERVED_PAGE_DIVISOR = 128


class Admission:
    """Decides which waiting requests start. It changes no request; the scheduler starts those that it returns."""

    def __init__(self, allocator: PageAllocator, prefix_cache: PrefixCache) -> None:
        self.allocator = allocator
        self.prefix_cache = prefix_cache
        # Arrival index of the last request that did not fit, and number of pages that were free for it.
        self._blocked = (-1, 0)

    def reset(self) -> None:
        """Forget which request did not fit, because all pages are free again."""
        self._blocked = (-1, 0)

    def can_start(self, request: Request, allowed: frozenset[Request] | None) -> bool:
        """Return whether a waiting request may start, apart from its pages.

        Args:
            request: waiting request.
            allowed: requests that may start. None = all.
        """
        return (allowed is None or request in allowed) and not self._waits_for_prefix(request)

    def select(
        self,
        waiting: Sequence[Request],
        running: Sequence[Request],
        max_batch: int,
        allowed: frozenset[Request] | None,
    ) -> Iterator[tuple[Request, PrefixHit]]:
        """Yield the requests to start in order, with their prefix-cache hits; stop at the first that does not fit.

        The caller moves each request from `waiting` to `running` before it takes the next one. Requests that are not
        allowed, or that wait for the pages of another request with the same prompt, are skipped and stay.

        Args:
            waiting: waiting requests in scheduling order.
            running: running requests.
            max_batch: running requests at most.
            allowed: requests that may start. None = all.
        """
        num_skipped = 0
        while num_skipped < len(waiting) and len(running) < max_batch:
            request = waiting[num_skipped]
            if not self.can_start(request, allowed):
                num_skipped += 1
            elif (hit := self.match_if_fits(request, running)) is not None:
                yield request, hit
            else:
                break

    def match_if_fits(self, request: Request, running: Sequence[Request]) -> PrefixHit | None:
        """Look up a waiting request in the prefix cache. Returns None if its tokens do not fit in the free pages.

        Two groups of pages do not count as free: those that the running requests still need for their committed tokens,
        and a reserve. So no preemption follows an admission in the same step. If no request runs, every request fits,
        because `Engine.check` refused those that do not fit in an empty pool.
        """
        if not running:
            return self.prefix_cache.match(request)
        num_free = self._count_free_pages(running)
        if self._is_blocked(request, num_free):
            return None
        hit = self.prefix_cache.match(request)
        # Hit pages that a running request holds are not taken from the free pages.
        num_held = sum(self.allocator.num_holders(page) > 0 for page in hit.pages)
        if self.allocator.count_pages(request.num_tokens) - num_held <= num_free:
            return hit
        self._blocked = request.arrival_index, num_free
        return None

    def find_shared_slots(
        self,
        waiting: Sequence[Request],
        running: Sequence[Request],
        num_free_slots: int,
        allowed: frozenset[Request] | None,
    ) -> list[int]:
        """Return the slots whose deferred draft KV has to be written before the next requests start.

        These are the slots of running requests that filled pages which a waiting request would share. The prefix cache
        cannot count the draft KV of such a page before it is written.
        """
        if not running or not waiting or not num_free_slots or not self.prefix_cache.has_draft_kv:
            return []
        num_free = self._count_free_pages(running)
        slots: dict[int, None] = {}
        for request in waiting:
            if not num_free_slots or self._is_blocked(request, num_free):
                break
            if self.can_start(request, allowed):
                slots |= dict.fromkeys(self.prefix_cache.find_unrecorded_slots(request))
                num_free_slots -= 1
        return list(slots)

    def _count_free_pages(self, running: Sequence[Request]) -> int:
        allocator = self.allocator
        num_promised = sum(max(allocator.count_pages(r.num_tokens) - len(r.pages), 0) for r in running)
        return (
            allocator.num_available - num_promised - MIN_RESERVED_PAGES - allocator.num_pages // RESERVED_PAGE_DIVISOR
        )

    def _is_blocked(self, request: Request, num_free: int) -> bool:
        """Return whether the request did not fit when at least as many pages were free, so the lookup is skipped."""
        return self._blocked[0] == request.arrival_index and num_free <= self._blocked[1]

    def _waits_for_prefix(self, request: Request) -> bool:
        """Return whether the first of the n requests of this prompt still computes the pages that all of them share."""
        first = request.waits_for
        # A preempted request is not waited for: its full pages are in the prefix cache, or were evicted.
        if (
            first is None
            or first.status not in (RequestStatus.WAITING, RequestStatus.RUNNING)
            or not self.prefix_cache.is_active
        ):
            return False
        size = self.allocator.page_size
        spec = request.spec
        num_shared = (len(spec.prompt) - 1) // size * size  # tokens in full pages, without the last prompt token
        # A request with prompt_logprobs takes no pages of others: it computes every token of its prompt.
        return spec.sampling.prompt_logprobs is None and first.num_computed < num_shared
