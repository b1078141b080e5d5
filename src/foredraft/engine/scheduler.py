"""Scheduling: which requests run in a step, and how many tokens each of them computes.

There are no separate prefill and decode phases. A step computes the next chunk of a request's uncomputed tokens:

tokens   [0 ..... num_computed)[num_computed .. num_tokens)[ draft ]
          KV is written         this step's chunk           verified by the same pass

A request with one uncomputed token is *decoding*. A request with several is a *prompt*: it is new, or was preempted and
is recomputed. The token budget of a step goes to decoding requests first, then to prompts, then to drafts.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from foredraft.draft_length.policy import DraftCandidate, DraftLengthPolicy
from foredraft.kv.allocator import OutOfPagesError, PageAllocator
from foredraft.kv.prefix_cache import PrefixCache, PrefixHit
from foredraft.request import Batch, Request, RequestStatus
from foredraft.tree import Commit

# At admission one page stays free, and one more for every 128 pages of the pool, so that running requests can grow.
MIN_RESERVED_PAGES = 1
RESERVED_PAGE_DIVISOR = 128


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of one step, in requests and tokens."""

    max_batch: int = 32  # running requests
    max_step_tokens: int = 2048  # tokens of one forward pass of the target, draft nodes included
    max_chunk: int = 512  # prompt tokens of one request in a step; of all prompts together while a request decodes


class Scheduler:
    """Scheduler that orders requests by priority number, then by arrival.

    If pages run out, the last running request in this order is preempted: its pages are freed and it is requeued. When
    it runs again, it takes the pages that the prefix cache still has, and computes the other tokens again.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        limits: SchedulerLimits,
        forget_slots: Callable[[Sequence[int]], None],
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """Set up a scheduler without requests.

        Args:
            allocator: pages of the KV pool.
            limits: limits of one step.
            forget_slots: called with slots that become free (`Request.slot`); `reset` calls it with all slots.
            prefix_cache: cache of full pages. None = pages are never shared or reused.
        """
        self.allocator = allocator
        self.limits = limits
        self.prefix_cache = prefix_cache or PrefixCache(allocator, is_active=False)
        self.waiting: list[Request] = []  # sorted by `_get_queue_key`
        self.running: list[Request] = []  # sorted by `_get_queue_key`
        self.num_preempted = 0
        self.prefix_queries = 0  # tokens of admitted requests, counted at admission
        self.prefix_hits = 0  # tokens of `prefix_queries` whose KV came from the prefix cache
        self._forget_slots = forget_slots
        self._free_slots = list(range(limits.max_batch))  # heap
        self._num_arrived = 0
        self._step_index = 0
        # Arrival index of the last request that did not fit, and number of pages that were free for it.
        self._blocked_admission = (-1, 0)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self._enqueue(request, RequestStatus.WAITING)

    def schedule(
        self,
        max_nodes: int,
        length_policy: DraftLengthPolicy,
        allowed: frozenset[Request] | None = None,
        deferred: frozenset[Request] = frozenset(),
    ) -> Batch:
        """Choose the batch of the next step and reserve its pages.

        All chunks of committed tokens are scheduled before any draft node.

        Args:
            max_nodes: upper limit of the drafter on the draft nodes of a request (`Drafter.max_nodes`).
            length_policy: grants draft nodes to each request.
            allowed: requests that may run or be admitted. None = all.
            deferred: requests that may not run. If the batch is full, they are preempted for waiting requests.
        """
        self._step_index += 1
        if deferred:
            requests = (*self.running, *self.waiting)
            allowed = frozenset(r for r in requests if r not in deferred and (allowed is None or r in allowed))
            self._preempt_deferred(allowed, deferred)
        if self.waiting:
            self._admit_waiting(allowed)
        scheduled = self._select_chunks(self.running if allowed is None else [r for r in self.running if r in allowed])
        granted_by_slot = self._grant_draft_nodes(scheduled, max_nodes, length_policy) if max_nodes else {}
        tokens_left = self.limits.max_step_tokens - sum(chunk for _, chunk in scheduled)
        granted = [0] * len(scheduled)  # draft nodes per request, within the token limit of the step and the free pages
        if granted_by_slot:
            for i, (request, chunk) in enumerate(scheduled):
                num_nodes = min(granted_by_slot.get(request.slot, 0), tokens_left)
                granted[i] = self._reserve_draft_nodes(request, chunk, num_nodes)
                tokens_left -= granted[i]
        requests, chunks = tuple(request for request, _ in scheduled), tuple(chunk for _, chunk in scheduled)
        return Batch(requests, chunks, tuple(granted), self.allocator.page_size)

    def commit(self, batch: Batch, commit: Commit) -> None:
        """Append the new tokens to the requests, advance `num_computed`, and free pages of rejected draft nodes."""
        size = self.allocator.page_size
        for request, tokens, count in zip(batch.requests, commit.tokens, commit.counts, strict=True):
            # tokens[i] follows node path[i] of the commit, so tokens[0] is token num_computed + 1 of the request. A
            # chunk that ends before the last committed token has old tokens only: the slice is empty.
            num_old = request.num_tokens - request.num_computed - 1  # committed tokens from that one on
            request.output += tokens[num_old:] if num_old else tokens
            request.num_computed += count  # KV entries that stay: one per node of the path
            if len(request.pages) * size >= request.num_computed + size:  # at least one whole page is unused
                self.allocator.shrink(request.pages, request.num_computed)
            if request.num_computed // size > request.num_cached_pages:  # at least one more page is full
                self.prefix_cache.insert(request)

    def finish(self, request: Request, has_invalid_kv: bool = False) -> None:
        """Remove a waiting or running request and free its slot and pages.

        Args:
            request: request to remove.
            has_invalid_kv: drop the pages that the request wrote from the prefix cache.
        """
        try:
            if request.status is RequestStatus.RUNNING:
                self._release_slot(request, is_finished=True, has_invalid_kv=has_invalid_kv)
            elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                _remove_from_queue(self.waiting, request)
        finally:  # requests that wait for the pages of this one (`waits_for`) may run once its status is FINISHED
            request.status = RequestStatus.FINISHED

    def reset(self, live: Iterable[Request] | None = None) -> None:
        """Drop all KV and requeue the live requests, whatever state an interrupted step left.

        The KV pool of the drafter is cleared too, because it uses the page ids that are freed here. The KV pool of the
        target is left to the caller.

        Args:
            live: requests to requeue; any other request is finished. None = all running and waiting requests.
        """
        queued = {*self.running, *self.waiting}
        requeued = queued if live is None else set(live)
        for request in queued - requeued:
            request.status = RequestStatus.FINISHED
        self._forget_slots(range(self.limits.max_batch))  # all: an interrupted step may have lost the owner of a slot
        draft_kv = self.prefix_cache.draft_kv_owner.draft_kv  # the owner is the engine's drafter, in its sandbox
        if draft_kv is not None:
            draft_kv.pool.clear()
        self._free_slots = list(range(self.limits.max_batch))
        self._blocked_admission = (-1, 0)
        self.prefix_cache.clear()
        for request in requeued:
            request.status = (
                RequestStatus.WAITING if request.status is RequestStatus.WAITING else RequestStatus.PREEMPTED
            )
            request.pages.clear()
            request.num_computed = request.num_hit_pages = request.num_cached_pages = request.num_draft_cached_pages = 0
            request.page_hashes.clear()  # the caller may truncate the output, which changes the hashes
            request.inserted_hashes.clear()
        self.running.clear()
        self.waiting[:] = sorted(requeued, key=_get_queue_key)

    def check_idle(self) -> None:
        """Assert, in constant time, that an idle scheduler holds no pages and no slots."""
        assert not self.allocator.num_used, "pages are held and no request runs"
        assert len(self._free_slots) == self.limits.max_batch, "a slot was lost or assigned twice"

    def check_integrity(self) -> None:
        """Assert all invariants of pages, slots and queues."""
        self.allocator.check_integrity([request.pages for request in self.running])
        self.prefix_cache.check_integrity()
        slots = [request.slot for request in self.running]
        all_slots = list(range(self.limits.max_batch))
        assert sorted(slots + self._free_slots) == all_slots, "a slot was lost or assigned twice"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_get_queue_key), "requests are out of order"
        for request in self.running:
            assert request.num_computed < request.num_tokens, "a running request has nothing to compute"
            self.check_writes(request)

    def check_writes(self, request: Request) -> None:
        """Assert that the pages the request will write to are neither shared nor in the prefix cache."""
        for page in request.pages[request.num_computed // self.allocator.page_size :]:
            assert self.allocator.num_holders(page) == 1, "a page that is written to is held by two requests"
            assert not self.allocator.is_cacheable(page), "a page that is written to is in the prefix cache"

    def _grant_draft_nodes(
        self, scheduled: Sequence[tuple[Request, int]], max_nodes: int, length_policy: DraftLengthPolicy
    ) -> dict[int, int]:
        """Return the draft nodes that the policy grants, by slot.

        Only requests whose chunk ends with their last committed token can draft.

        Args:
            scheduled: pairs (request, chunk length) of the step.
            max_nodes: upper limit of the drafter on the draft nodes of a request.
            length_policy: grants draft nodes to each request.
        """
        candidates = []
        for request, chunk in scheduled:
            fixed = request.fixed_draft_length  # draft length set by the request
            limit = max_nodes if fixed is None else min(max_nodes, fixed)  # upper limit on the nodes of this request
            if limit > 0 and request.num_computed + chunk == request.num_tokens and request.max_draft_depth > 0:
                kind = int(not request.sampling.is_greedy)  # the policy has separate estimates: 0 greedy, 1 sampled
                candidates.append(DraftCandidate(request.slot, limit, fixed is not None, kind))
        if not candidates:
            return {}
        num_pass_tokens = sum(chunk for _, chunk in scheduled)  # tokens of the forward pass without draft nodes
        # Each of them counts as attending to all earlier tokens and to its whole chunk.
        attended_tokens = sum(chunk * (request.num_computed + chunk) for request, chunk in scheduled)
        granted = length_policy.allocate(candidates, num_pass_tokens, attended_tokens)
        return {candidate.slot: nodes for candidate, nodes in zip(candidates, granted, strict=True)}

    def _reserve_draft_nodes(self, request: Request, chunk: int, num_nodes: int) -> int:
        """Reserve pages for `num_nodes` draft nodes after the chunk.

        Returns `num_nodes`, or 0 if too few pages are free: drafts preempt no request.
        """
        if num_nodes <= 0:
            return 0
        try:
            self.allocator.grow(request.pages, request.num_computed + chunk + num_nodes)
        except OutOfPagesError:
            return 0
        return num_nodes

    def _select_chunks(self, running: Sequence[Request]) -> list[tuple[Request, int]]:
        """Choose pairs (request, chunk length) within the token budget, and reserve their pages."""
        decoding = [r for r in running if r.num_tokens - r.num_computed == 1]
        prompts = [r for r in running if r.num_tokens - r.num_computed > 1] if len(decoding) < len(running) else []
        tokens_left = self.limits.max_step_tokens
        order = [*decoding, *prompts]
        # The token budget may be too small to give every decoding request and one prompt a token. The requests then
        # take turns: those that have not run for the longest time come first.
        if len(decoding) + bool(prompts) > tokens_left:
            order.sort(key=_get_last_step)
        # While any request is decoding, all prompts together get at most `max_chunk` tokens per step. This bounds the
        # time of the step, and so the time between two tokens of the decoding request.
        prompt_tokens_left = self.limits.max_chunk if decoding else tokens_left
        chunks: dict[Request, int] = {}
        for request in order:
            missing = request.num_tokens - request.num_computed
            chunk = 1 if missing == 1 else min(missing, self.limits.max_chunk, prompt_tokens_left, tokens_left)
            if (
                chunk > 0
                and request.status is RequestStatus.RUNNING  # false if it was preempted in this loop
                and self._reserve_pages(request, request.num_computed + chunk, chunks)
            ):
                chunks[request] = chunk
                request.last_step = self._step_index
                tokens_left -= chunk
                prompt_tokens_left -= chunk if missing > 1 else 0
            if tokens_left <= 0:
                break
        return list(chunks.items())

    def _reserve_pages(self, request: Request, length: int, chunks: dict[Request, int]) -> bool:
        """Reserve pages for `length` tokens. If they run out, preempt the last running request and try again.

        Preempted requests are removed from `chunks`. Returns False if `request` itself was preempted.
        """
        while True:
            try:
                self.allocator.grow(request.pages, length)
                return True
            except OutOfPagesError:
                last = self.running[-1]
                chunks.pop(last, None)
                self._preempt(last)
                if last is request:
                    return False

    def _admit_waiting(self, allowed: frozenset[Request] | None) -> None:
        """Admit waiting requests in order; stop at the first that does not fit.

        Requests that are not allowed, or that wait for the pages of another request with the same prompt, are skipped
        and stay in the queue.
        """
        skipped: list[Request] = []
        num_visited = 0  # requests at the front of the queue that were admitted or skipped
        for request in self.waiting:
            if len(self.running) == self.limits.max_batch:
                break
            if (allowed is not None and request not in allowed) or self._waits_for_prefix(request):
                skipped.append(request)
            elif (hit := self._match_if_fits(request)) is not None:
                self._start_request(request, hit)
            else:
                break
            num_visited += 1
        if num_visited > len(skipped):  # remove the admitted requests from the queue, keep the skipped ones
            self.waiting[:num_visited] = skipped

    def _preempt_deferred(self, allowed: frozenset[Request], deferred: frozenset[Request]) -> None:
        """If the batch is full, preempt one deferred request per waiting request that may run, the last ones first."""
        if len(self.running) == self.limits.max_batch:
            num_waiting = sum(request in allowed and not self._waits_for_prefix(request) for request in self.waiting)
            candidates = [request for request in reversed(self.running) if request in deferred]
            for request in candidates[:num_waiting]:
                self._preempt(request)

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
        num_shared = (len(request.prompt) - 1) // size * size  # tokens in full pages, without the last prompt token
        # A request with prompt_logprobs takes no pages of others: it computes every token of its prompt.
        return request.sampling.prompt_logprobs is None and first.num_computed < num_shared

    def _match_if_fits(self, request: Request) -> PrefixHit | None:
        """Look up a waiting request in the prefix cache. Returns None if its tokens do not fit in the free pages.

        Two groups of pages do not count as free: those that the running requests still need for their committed tokens,
        and a reserve. So an admission does not cause a preemption in the same step. If no request runs, every request
        fits, because `Engine.check` refused those that do not fit in an empty pool.
        """
        if not self.running:
            return self.prefix_cache.match(request)
        allocator = self.allocator
        num_promised = sum(max(allocator.count_pages(r.num_tokens) - len(r.pages), 0) for r in self.running)
        num_reserved = MIN_RESERVED_PAGES + allocator.num_pages // RESERVED_PAGE_DIVISOR
        num_free = allocator.num_available - num_promised - num_reserved
        if self._blocked_admission[0] == request.arrival_index and num_free <= self._blocked_admission[1]:
            return None  # it did not fit when at least as many pages were free, so the lookup is skipped
        hit = self.prefix_cache.match(request)
        # Hit pages that a running request holds are not taken from the free pages.
        num_held = sum(allocator.num_holders(page) > 0 for page in hit.pages)
        num_missing = allocator.count_pages(request.num_tokens) - num_held
        if num_missing <= num_free:
            return hit
        self._blocked_admission = request.arrival_index, num_free
        return None

    def _start_request(self, request: Request, hit: PrefixHit) -> None:
        """Move a request to the running ones, with a slot and the pages of its prefix-cache hit."""
        request.slot = heapq.heappop(self._free_slots)
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_get_queue_key)
        self.prefix_cache.apply_hit(request, hit)  # sets num_computed
        self.prefix_queries += request.num_tokens
        self.prefix_hits += request.num_computed
        if request.num_cached_tokens is None:  # the first run, not one after a preemption
            request.num_cached_tokens = min(request.num_computed, len(request.prompt))

    def _enqueue(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        insort(self.waiting, request, key=_get_queue_key)

    def _preempt(self, request: Request) -> None:
        self._release_slot(request, is_finished=False)
        self._enqueue(request, RequestStatus.PREEMPTED)
        self.num_preempted += 1

    def _release_slot(self, request: Request, is_finished: bool, has_invalid_kv: bool = False) -> None:
        """Free slot and pages of a running request."""
        _remove_from_queue(self.running, request)
        self.prefix_cache.release(request, is_finished, has_invalid_kv)
        self._forget_slots([request.slot])
        heapq.heappush(self._free_slots, request.slot)


def _get_queue_key(request: Request) -> tuple[int, int]:
    """Sort key of both queues: lower priority numbers first, then earlier arrivals."""
    return request.priority, request.arrival_index


def _remove_from_queue(queue: list[Request], request: Request) -> None:
    """Remove a request from a sorted queue."""
    index = bisect_left(queue, _get_queue_key(request), key=_get_queue_key)
    assert queue[index] is request, "the sort key of a queued request changed"
    del queue[index]


def _get_last_step(request: Request) -> int:
    return request.last_step
