"""Who runs in a step. No prefill phase and no decode phase: each request's computed tokens catch up with its tokens.

tokens   [0 ......... computed)[computed ... num_tokens)[ draft ]
          KV is written         this step's chunk        verified by the same pass
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.controller import Ask, Lengths
from foredraft.kv.blocks import OutOfPagesError, PageAllocator
from foredraft.request import Batch, Request
from foredraft.tree import Commit


@dataclass(frozen=True)
class Limits:
    max_batch: int = 32  # requests that run at once
    max_step_tokens: int = 2048  # tokens of one target pass, drafts included
    max_chunk: int = 512  # prompt tokens of one request in one pass


class Scheduler:
    """Requests first come, first served; the youngest gives way when pages run out and is recomputed later."""

    def __init__(self, allocator: PageAllocator, limits: Limits, forget: Callable[[Sequence[int]], None]) -> None:
        self.allocator = allocator
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preempted = 0
        self._forget = forget  # told of every slot that leaves
        self._slots = list(range(limits.max_batch))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def next(self, num_nodes: int, lengths: Lengths) -> Batch:
        """The next step's batch. Every request goes on before any is drafted for, with up to `num_nodes` nodes each."""
        self._admit()
        rows = self._chunks()
        wanted = self._wanted(rows, num_nodes, lengths)
        left = self.limits.max_step_tokens - sum(chunk for _, chunk in rows)
        budgets = []
        for request, chunk in rows:
            budgets.append(self._draft_budget(request, chunk, min(wanted.get(request.slot, 0), left)))
            left -= budgets[-1]
        requests, chunks = tuple(request for request, _ in rows), tuple(chunk for _, chunk in rows)
        return Batch(requests, chunks, tuple(budgets), self.allocator.page_size)

    def _wanted(self, rows: Sequence[tuple[Request, int]], num_nodes: int, lengths: Lengths) -> dict[int, int]:
        """slot -> nodes its draft should have; only requests whose chunk reaches their last token are in it."""
        asks = []
        for request, chunk in rows:
            is_scored = request.computed + chunk == request.num_tokens
            own = num_nodes if request.num_drafts is None else min(num_nodes, request.num_drafts)
            if is_scored and own > 0 and request.room > 0:
                asks.append(Ask(request.slot, own, request.num_drafts is not None))
        if not asks:
            return {}
        context = sum(chunk * (request.computed + chunk) for request, chunk in rows)
        budgets = lengths.allot(asks, sum(chunk for _, chunk in rows), context)
        return {ask.slot: budget for ask, budget in zip(asks, budgets, strict=True)}

    def _chunks(self) -> list[tuple[Request, int]]:
        """Who computes how many committed tokens, with pages for them."""
        left = self.limits.max_step_tokens
        rows: list[tuple[Request, int]] = []
        for request in list(self.running):
            if request not in self.running or left <= 0:  # preempted a moment ago, or no budget in this step
                continue
            chunk = min(request.num_tokens - request.computed, self.limits.max_chunk, left)
            if self._reserve(request, request.computed + chunk):
                rows.append((request, chunk))
                left -= chunk
        return [row for row in rows if row[0] in self.running]

    def _draft_budget(self, request: Request, chunk: int, wanted: int) -> int:
        """`wanted` nodes if the chunk reaches the last token and pages are free; nobody gives way to a draft."""
        length = request.computed + chunk
        if length < request.num_tokens or request.room <= 0 or wanted <= 0:
            return 0
        try:
            self.allocator.grow(request.pages, length + wanted)
        except OutOfPagesError:
            return 0
        return wanted

    def commit(self, batch: Batch, commit: Commit) -> None:
        """Move every request on by what was kept, and return the slots that nothing was committed to."""
        for request, tokens, count in zip(batch.requests, commit.token_lists, commit.counts, strict=True):
            known = request.num_tokens - request.computed - 1
            request.output += tokens[known:]
            request.computed += count
            self.allocator.shrink(request.pages, request.computed)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free what it holds."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self.running.remove(request)
            self._release(request)

    def check_integrity(self) -> None:
        self.allocator.check_integrity([request.pages for request in self.running])
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._slots) == list(range(self.limits.max_batch)), "a slot was lost or given twice"
        for request in self.running:
            assert request.computed < request.num_tokens, "a running request has nothing to compute"

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_batch:
            request = self.waiting[0]
            first = min(request.num_tokens, self.limits.max_chunk)
            if self.running and self.allocator.pages_for(first) > self.allocator.num_free:
                return
            self.waiting.popleft()
            request.slot = heapq.heappop(self._slots)
            self.running.append(request)

    def _reserve(self, request: Request, length: int) -> bool:
        """Pages for `length` tokens; preempts younger requests for them, or in the end this one."""
        while True:
            try:
                self.allocator.grow(request.pages, length)
                return True
            except OutOfPagesError:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is request:
                    return False

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.computed = 0
        self.waiting.appendleft(request)
        self.num_preempted += 1

    def _release(self, request: Request) -> None:
        self.allocator.free(request.pages)
        request.pages.clear()
        self._forget([request.slot])
        heapq.heappush(self._slots, request.slot)
