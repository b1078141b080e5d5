"""Scheduling: which requests run in a step, and how many tokens each of them computes.

There are no separate prefill and decode phases. A step computes the next chunk of a request's uncomputed tokens:

tokens   [0 ..... num_computed)[num_computed .. num_tokens)[ draft ]
          KV is written         this step's chunk           verified by the same pass

A request with one uncomputed token is *decoding*. A request with several is a *prompt*: it is new, or was preempted and
is recomputed. The token budget of a step goes to decoding requests first, then to prompts, then to drafts.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from foredraft.draft_length.length_table import LengthBounds
from foredraft.draft_length.policy import DraftLengthPolicy
from foredraft.engine.admission import Admission
from foredraft.engine.draft_grants import grant_draft_nodes
from foredraft.engine.free_slots import FreeSlots
from foredraft.engine.preemption import Preemption
from foredraft.engine.releases import ReleasePlanner, Releases
from foredraft.engine.request_queue import RequestQueue, get_queue_key
from foredraft.engine.step_chunks import SchedulerLimits as SchedulerLimits
from foredraft.engine.step_chunks import select_chunks
from foredraft.kv.allocator import PageAllocator
from foredraft.kv.prefix_cache import PrefixCache, PrefixHit
from foredraft.request import Batch, Request, RequestStatus
from foredraft.tree import Commit


class Scheduler:
    """Scheduler that orders requests by priority number (the lowest runs first), then by arrival.

    If pages run out, the last running request in this order is preempted: its pages are freed and it is requeued. When
    it runs again, it takes the pages that the prefix cache still has, and computes the other tokens again. The
    scheduler is the only writer of a request's fields, except those of its grammar matcher. It calls no drafter, and
    returns which draft KV to write (`find_releases`) and which slots become free (`preempt`, `finish`).
    """

    def __init__(
        self, allocator: PageAllocator, limits: SchedulerLimits, prefix_cache: PrefixCache | None = None
    ) -> None:
        """Set up a scheduler without requests.

        Args:
            allocator: pages of the KV pool.
            limits: limits of one step.
            prefix_cache: cache of full pages. None = pages are never shared or reused.
        """
        self.allocator = allocator
        self.limits = limits
        self.prefix_cache = prefix_cache or PrefixCache(allocator, is_active=False)
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.num_preempted = 0
        self.prefix_queries = 0  # tokens of admitted requests, counted at admission
        self.prefix_hits = 0  # tokens of `prefix_queries` whose KV came from the prefix cache
        self._admission = Admission(allocator, self.prefix_cache)
        self._release_planner = ReleasePlanner(self._admission, Preemption(allocator, limits))
        self._free_slots = FreeSlots(limits.max_batch)
        self._counter = itertools.count()  # numbers arrivals (`arrival_index`) and steps (`last_step`)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        request.arrival_index = next(self._counter)
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def exclude(self, deferred: frozenset[Request], allowed: frozenset[Request] | None) -> frozenset[Request]:
        """Return the allowed requests that are not deferred; `allowed` None = all."""
        requests = (*self.running, *self.waiting)
        return frozenset(r for r in requests if r not in deferred and (allowed is None or r in allowed))

    def find_releases(
        self, allowed: frozenset[Request] | None = None, deferred: frozenset[Request] = frozenset()
    ) -> Releases:
        """Return what has to happen before the next `schedule`. Nothing is changed.

        Args:
            allowed: requests that may run or be admitted. None = all.
            deferred: requests that may not run. If the batch is full, they are preempted for waiting requests.
        """
        return self._release_planner.plan(self.running, self.waiting, allowed, deferred)

    def preempt(self, requests: Sequence[Request]) -> list[int]:
        """Free the pages of running requests and requeue them. Returns the slots that become free."""
        slots = []
        for request in requests:
            slots.append(self._release(request, is_finished=False))
            request.status = RequestStatus.PREEMPTED
            self.waiting.add(request)
            self.num_preempted += 1
        return slots

    def schedule(
        self, max_nodes: int, length_policy: DraftLengthPolicy, allowed: frozenset[Request] | None = None
    ) -> Batch:
        """Choose the batch of the next step and reserve its pages. Preempt the requests of `find_releases` before.

        All chunks of committed tokens are scheduled before any draft node.

        Args:
            max_nodes: upper limit of the drafter on the draft nodes of a request (`DrafterSpec.max_nodes`).
            length_policy: grants draft nodes to each request.
            allowed: requests that may run or be admitted. None = all.
        """
        step_index = next(self._counter)
        if self.waiting:
            for request, hit in self._admission.select(self.waiting, self.running, self.limits.max_batch, allowed):
                self._start_request(request, hit)
        running = self.running if allowed is None else [r for r in self.running if r in allowed]
        scheduled = select_chunks(running, self.limits)
        for request, chunk in scheduled:
            self.allocator.grow(request.pages, request.num_computed + chunk)
            request.last_step = step_index
        chunks = tuple([chunk for _, chunk in scheduled])
        tokens_left = self.limits.max_step_tokens - sum(chunks)
        bounds = self.limits.draft_limits.find(len(scheduled)).narrow(LengthBounds(0, max_nodes))
        granted = grant_draft_nodes(scheduled, bounds, length_policy, self.allocator, tokens_left)
        return Batch(tuple([request for request, _ in scheduled]), chunks, granted, self.allocator.page_size)

    def commit(self, batch: Batch, commit: Commit) -> None:
        """Append the new tokens to the requests, advance `num_computed`, and free pages of rejected draft nodes."""
        size = self.allocator.page_size
        for request, tokens, count in zip(batch.requests, commit.tokens, commit.counts, strict=True):
            # `tokens` starts with the successors of the chunk's nodes, which are committed already. tokens[i] is at
            # position num_computed + 1 + i, so the first num_old entries are old. If the chunk ends before the last
            # committed token, all entries are old, and nothing is appended.
            num_old = request.num_tokens - request.num_computed - 1
            request.output += tokens[num_old:] if num_old else tokens
            num_full = request.num_computed // size  # full pages before this step
            request.num_computed += count  # KV entries that stay: one per node of the path
            if len(request.pages) * size >= request.num_computed + size:  # at least one whole page is unused
                self.allocator.shrink(request.pages, request.num_computed)
            if request.num_computed // size > num_full:  # at least one more page is full
                self.prefix_cache.insert(request)

    def find_unwritten_slots(self, requests: Sequence[Request]) -> list[int]:
        """Return the slots whose draft KV must be written before `finish`, because their pages stay in the cache."""
        running = [request for request in requests if request.status is RequestStatus.RUNNING]
        return [request.slot for request in running if self.prefix_cache.keeps_pages(request, is_finished=True)]

    def finish(self, request: Request, has_invalid_kv: bool = False) -> list[int]:
        """Remove a waiting or running request and free its pages. Returns the slot that becomes free, if it ran.

        Args:
            request: request to remove.
            has_invalid_kv: the KV that the request has computed may be invalid. Its pages leave the prefix cache.
        """
        try:
            if request.status is RequestStatus.RUNNING:
                return [self._release(request, is_finished=True, has_invalid_kv=has_invalid_kv)]
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                self.waiting.take(request)
            return []
        finally:  # requests that wait for the pages of this one (`waits_for`) may run once its status is FINISHED
            request.status = RequestStatus.FINISHED
            self.prefix_cache.forget(request)

    def reset(self, output_lengths: Mapping[Request, int]) -> None:
        """Free all pages and slots and requeue requests, whatever state an interrupted step left.

        The caller clears the tensors of the KV pools and the state of the drafter.

        Args:
            output_lengths: requests to requeue, with the number of output tokens that each of them keeps. Any other
                request is finished.
        """
        for request in {*self.running, *self.waiting} - output_lengths.keys():
            request.status = RequestStatus.FINISHED
        self._free_slots.reset()
        self._admission.reset()
        self.prefix_cache.clear()
        for request, length in output_lengths.items():
            if request.status is not RequestStatus.WAITING:
                request.status = RequestStatus.PREEMPTED
            request.pages.clear()
            request.num_computed = 0
            del request.output[length:]
        self.running.clear()
        self.waiting[:] = sorted(output_lengths, key=get_queue_key)

    def check_idle(self) -> None:
        """Assert, in constant time, that an idle scheduler holds no slots, and no pages but cached ones."""
        assert not self.allocator.num_used, "pages are held and no request runs"
        self._free_slots.check_all_free()

    def check_integrity(self) -> None:
        """Assert all invariants of pages, slots and queues."""
        self.allocator.check_integrity([request.pages for request in self.running])
        self.prefix_cache.check_integrity()
        self._free_slots.check(request.slot for request in self.running)
        self.running.check_order()
        self.waiting.check_order()
        for request in self.running:
            assert request.num_computed < request.num_tokens, "a running request has nothing to compute"
        self.check_writes(self.running)

    def check_writes(self, requests: Iterable[Request]) -> None:
        """Assert that the pages the requests will write to are neither shared nor in the prefix cache."""
        for request in requests:
            self.allocator.check_writable(request.pages[request.num_computed // self.allocator.page_size :])

    def _start_request(self, request: Request, hit: PrefixHit) -> None:
        """Move a waiting request to the running ones, with a slot and the pages of its prefix-cache hit."""
        self.waiting.take(request)
        request.slot = self._free_slots.take()
        request.status = RequestStatus.RUNNING
        self.running.add(request)
        self.prefix_cache.acquire(request, hit)
        request.pages += hit.pages
        request.num_computed = len(hit.pages) * self.allocator.page_size
        request.lacks_states = False
        self.prefix_queries += request.num_tokens
        self.prefix_hits += request.num_computed
        if request.num_cached_tokens is None:  # the first run, not one after a preemption
            request.num_cached_tokens = min(request.num_computed, len(request.spec.prompt))

    def _release(self, request: Request, is_finished: bool, has_invalid_kv: bool = False) -> int:
        """Free the pages and the slot of a running request. Returns the slot."""
        self.running.take(request)
        self.prefix_cache.release(request, is_finished, has_invalid_kv)
        request.pages.clear()
        request.num_computed = 0
        self._free_slots.give_back(request.slot)
        return request.slot


def record_states(batch: Batch, are_given: bool, is_final: bool) -> None:
    """Record whether the drafter gets the hidden states of a step (`Request.lacks_states`).

    Args:
        batch: requests of the step.
        are_given: whether it gets them.
        is_final: whether a request that missed some lacks them until its end.
    """
    for request in batch.requests:
        request.lacks_states = not are_given or (is_final and request.lacks_states)
