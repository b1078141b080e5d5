"""Preemption: which running requests give way to others before a step."""

from collections.abc import Sequence

from foredraft.engine.step_chunks import SchedulerLimits
from foredraft.kv.allocator import PageAllocator
from foredraft.request import Request


class Preemption:
    """Chooses the requests to preempt. It changes no request and frees no page."""

    def __init__(self, allocator: PageAllocator, limits: SchedulerLimits) -> None:
        self.allocator = allocator
        self.limits = limits
        self._pages_per_chunk = limits.max_chunk // allocator.page_size + 1  # upper limit

    def has_room(self, running: Sequence[Request]) -> bool:
        """Return whether the pages last for any chunks of these requests. False may be wrong, and True is not."""
        num_block_pages = sum(
            r.spec.images.longest_block // self.allocator.page_size + 1 for r in running if r.spec.images is not None
        )
        return self.allocator.num_available >= self._pages_per_chunk * len(running) + num_block_pages

    def choose(
        self,
        running: Sequence[Request],
        allowed: frozenset[Request] | None,
        deferred: frozenset[Request],
        num_starting: int,
    ) -> list[Request]:
        """Return the requests to preempt, the last ones first.

        Args:
            running: running requests in scheduling order.
            allowed: requests that may run. None = all.
            deferred: requests that may not run. If the batch is full, they give their places to waiting requests.
            num_starting: waiting requests that may start.
        """
        preempted = []
        if deferred and len(running) == self.limits.max_batch:
            preempted = [request for request in reversed(running) if request in deferred][:num_starting]
        if not self.has_room(running):
            preempted += self._find_page_victims(running, allowed, preempted)
        return preempted

    def _find_page_victims(
        self, running: Sequence[Request], allowed: frozenset[Request] | None, leaving: Sequence[Request]
    ) -> list[Request]:
        """Return the last running requests, as many as must be preempted so that the others can grow.

        Pages are counted for the longest chunk of each request. An admission never causes a preemption in its step
        (`Admission.match_if_fits`).

        Args:
            running: running requests in scheduling order.
            allowed: requests that may run. None = all.
            leaving: requests that are preempted anyway.
        """
        allocator = self.allocator
        staying = [r for r in running if r not in leaving]
        needed = {
            r: max(allocator.count_pages(min(r.num_tokens, r.num_computed + self._get_chunk(r))) - len(r.pages), 0)
            for r in staying
            if allowed is None or r in allowed
        }
        num_needed = sum(needed.values())
        tables = [r.pages for r in leaving]
        victims = []
        while staying and num_needed > allocator.num_available + allocator.count_freed(tables):
            victim = staying.pop()
            victims.append(victim)
            tables.append(victim.pages)
            num_needed -= needed.get(victim, 0)
        return victims

    def _get_chunk(self, request: Request) -> int:
        """Return the most tokens of a request in a step; those of an image may have to be in one."""
        images = request.spec.images
        return self.limits.max_chunk if images is None else max(self.limits.max_chunk, images.longest_block)
