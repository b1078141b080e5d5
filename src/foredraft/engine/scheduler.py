"""Who runs in a step. No prefill phase and no decode phase: each request's computed tokens catch up with its tokens.

tokens   [0 ......... computed)[computed ... num_tokens)[ draft ]
          KV is written         this step's chunk        verified by the same pass

A request whose chunk is one token is a stream. A step's budget goes to streams first, then to prompts, then to drafts.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from foredraft.controller import Ask, Lengths
from foredraft.kv.blocks import OutOfPagesError, PageAllocator
from foredraft.kv.prefix import Hit, PrefixCache
from foredraft.request import Batch, Request, State
from foredraft.tree import Commit

SPARE = 128  # one in so many pages is not given to who comes in


@dataclass(frozen=True)
class Limits:
    max_batch: int = 32  # requests that run at once
    max_step_tokens: int = 2048  # tokens of one target pass, drafts included
    max_chunk: int = 512  # prompt tokens of one request in one pass; of all of them together while a stream runs


class Scheduler:
    """Requests by priority, then first come, first served; the last of them gives way when pages run out, is put back
    in its place and recomputed, from what the prefix cache still has of it."""

    def __init__(
        self,
        allocator: PageAllocator,
        limits: Limits,
        forget: Callable[[Sequence[int]], None],
        prefix: PrefixCache | None = None,
    ) -> None:
        """forget: told of every slot that leaves. prefix: None = nothing is ever shared or found again."""
        self.allocator = allocator
        self.limits = limits
        self.prefix = prefix or PrefixCache(allocator, is_active=False)
        self.waiting: list[Request] = []  # in order
        self.running: list[Request] = []  # in order
        self.num_preempted = 0
        self.prefix_queries = 0  # tokens of requests when they were admitted
        self.prefix_hits = 0  # those of them that were not computed again
        self._forget = forget
        self._slots = list(range(limits.max_batch))
        self._num_arrived = 0
        self._step = 0
        self._blocked = (-1, 0)  # the arrival of who did not fit, and how many pages there were

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._wait(request, State.WAITING)

    def next(
        self,
        num_nodes: int,
        lengths: Lengths,
        only: frozenset[Request] | None = None,
        resting: frozenset[Request] = frozenset(),
    ) -> Batch:
        """The next step's batch. Every request goes on before any is drafted for, with up to `num_nodes` nodes each.

        only: leave the others where they are, and admit none of them. resting: leave these too; they give their places
        up to requests that wait for one.
        """
        self._step += 1
        if resting:
            everyone = (*self.running, *self.waiting)
            only = frozenset(r for r in everyone if r not in resting and (only is None or r in only))
            self._make_room(only, resting)
        if self.waiting:
            self._admit(only)
        rows = self._chunks(self.running if only is None else [r for r in self.running if r in only])
        wanted = self._wanted(rows, num_nodes, lengths) if num_nodes else {}
        left = self.limits.max_step_tokens - sum(chunk for _, chunk in rows)
        budgets = [0] * len(rows)
        if wanted:
            for i, (request, chunk) in enumerate(rows):
                budgets[i] = self._draft_budget(request, chunk, min(wanted.get(request.slot, 0), left))
                left -= budgets[i]
        requests, chunks = tuple(request for request, _ in rows), tuple(chunk for _, chunk in rows)
        return Batch(requests, chunks, tuple(budgets), self.allocator.page_size)

    def commit(self, batch: Batch, commit: Commit) -> None:
        """Move every request on by what was kept, and return the slots that nothing was committed to."""
        size = self.allocator.page_size
        for request, tokens, count in zip(batch.requests, commit.token_lists, commit.counts, strict=True):
            known = request.num_tokens - request.computed - 1
            request.output += tokens[known:] if known else tokens
            request.computed += count
            if len(request.pages) * size >= request.computed + size:
                self.allocator.shrink(request.pages, request.computed)
            if request.computed // size > request.num_sealed:
                self.prefix.insert(request)

    def finish(self, request: Request, is_poisoned: bool = False) -> None:
        """Take a request out, wherever it is, and free what it holds. is_poisoned: what it computed is not trusted."""
        try:
            if request.state is State.RUNNING:
                self._release(request, True, is_poisoned)
            elif request.state in (State.WAITING, State.PREEMPTED):
                _take_out(self.waiting, request)
        finally:  # others may wait for this one's pages
            request.state = State.OVER

    def reset(self, live: Iterable[Request] | None = None) -> None:
        """After an error: nothing that was computed is trusted, and the live requests wait in their places, whatever an
        interrupted step made of the lines. live: None = all that run or wait; any other request is over."""
        known = {*self.running, *self.waiting}
        kept = known if live is None else set(live)
        for request in known - kept:
            request.state = State.OVER
        self._forget(range(self.limits.max_batch))  # a slot may have lost its request on the way
        memory = self.prefix.owner.memory
        if memory is not None:
            memory.pool.clear()
        self._slots = list(range(self.limits.max_batch))
        self._blocked = (-1, 0)
        self.prefix.clear()
        for request in kept:
            request.state = State.WAITING if request.state is State.WAITING else State.PREEMPTED
            request.pages.clear()
            request.computed = request.num_found = request.num_sealed = request.num_noted = 0
            request.hashes.clear()  # its output may be cut after this
            request.inserted.clear()
        self.running.clear()
        self.waiting[:] = sorted(kept, key=_place)

    def check_idle(self) -> None:
        """The part of `check_integrity` that takes no time: nothing runs, so nothing is held."""
        assert not self.allocator.num_used, "pages are held and nothing runs"
        assert len(self._slots) == self.limits.max_batch, "a slot was lost or given twice"

    def check_integrity(self) -> None:
        self.allocator.check_integrity([request.pages for request in self.running])
        self.prefix.check_integrity()
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._slots) == list(range(self.limits.max_batch)), "a slot was lost or given twice"
        for line in (self.running, self.waiting):
            assert line == sorted(line, key=_place), "requests are out of order"
        for request in self.running:
            assert request.computed < request.num_tokens, "a running request has nothing to compute"
            self.check_writes(request)

    def check_writes(self, request: Request) -> None:
        """Assert that no page the request may still write to is anybody else's, or known by what is written in it."""
        for page in request.pages[request.computed // self.allocator.page_size :]:
            assert self.allocator.num_holders(page) == 1, "a page that is written to is held by two requests"
            assert not self.allocator.is_kept(page), "a page that is written to is in the prefix cache"

    def _wanted(self, rows: Sequence[tuple[Request, int]], num_nodes: int, lengths: Lengths) -> dict[int, int]:
        """slot -> nodes its draft should have; only requests whose chunk reaches their last token are in it."""
        asks = []
        for request, chunk in rows:
            fixed = request.num_drafts
            own = num_nodes if fixed is None else min(num_nodes, fixed)
            if own > 0 and request.computed + chunk == request.num_tokens and request.room > 0:
                asks.append(Ask(request.slot, own, fixed is not None, int(not request.sampling.is_greedy)))
        if not asks:
            return {}
        context = sum(chunk * (request.computed + chunk) for request, chunk in rows)
        budgets = lengths.allot(asks, sum(chunk for _, chunk in rows), context)
        return {ask.slot: budget for ask, budget in zip(asks, budgets, strict=True)}

    def _draft_budget(self, request: Request, chunk: int, wanted: int) -> int:
        """`wanted` nodes if pages are free for them; nobody gives way to a draft."""
        if wanted <= 0:
            return 0
        try:
            self.allocator.grow(request.pages, request.computed + chunk + wanted)
        except OutOfPagesError:
            return 0
        return wanted

    def _chunks(self, runners: Sequence[Request]) -> list[tuple[Request, int]]:
        """Who computes how many committed tokens, with pages for them."""
        streams = [r for r in runners if r.num_tokens - r.computed == 1]
        prompts = [r for r in runners if r.num_tokens - r.computed > 1] if len(streams) < len(runners) else []
        left = self.limits.max_step_tokens
        order = [*streams, *prompts]
        if len(streams) + bool(prompts) > left:  # not even a token for everyone: take turns
            order.sort(key=_last_step)
        # of all prompts together, so that no stream waits for more than one chunk
        left_to_prompts = self.limits.max_chunk if streams else left
        rows: dict[Request, int] = {}
        for request in order:
            missing = request.num_tokens - request.computed
            chunk = 1 if missing == 1 else min(missing, self.limits.max_chunk, left_to_prompts, left)
            if chunk > 0 and request.state is State.RUNNING and self._reserve(request, request.computed + chunk, rows):
                rows[request] = chunk
                request.last_step = self._step
                left -= chunk
                left_to_prompts -= chunk if missing > 1 else 0
            if left <= 0:
                break
        return list(rows.items())

    def _reserve(self, request: Request, length: int, rows: dict[Request, int]) -> bool:
        """Pages for `length` tokens; preempts the last in order for them, or in the end this one."""
        while True:
            try:
                self.allocator.grow(request.pages, length)
                return True
            except OutOfPagesError:
                last = self.running[-1]
                rows.pop(last, None)
                self._preempt(last)
                if last is request:
                    return False

    def _admit(self, only: frozenset[Request] | None) -> None:
        """Take in who waits, in order. Where one does not fit, nobody behind it does; who waits for the first sample of
        its prompt holds up no one."""
        early: list[Request] = []
        num_seen = 0
        for request in self.waiting:
            if len(self.running) == self.limits.max_batch:
                break
            if (only is not None and request not in only) or self._is_early(request):
                early.append(request)
            elif (hit := self._fit(request)) is not None:
                self._enter(request, hit)
            else:
                break
            num_seen += 1
        if num_seen > len(early):
            self.waiting[:num_seen] = early

    def _make_room(self, only: frozenset[Request], resting: frozenset[Request]) -> None:
        """Where every place is taken: preempt, the last in order first, as many that rest as others wait."""
        if len(self.running) == self.limits.max_batch:
            num_wanted = sum(request in only and not self._is_early(request) for request in self.waiting)
            idle = [request for request in reversed(self.running) if request in resting]
            for request in idle[:num_wanted]:
                self._preempt(request)

    def _is_early(self, request: Request) -> bool:
        """Whether the pages it is to share are being computed by another request."""
        first = request.after
        if first is None or first.state not in (State.WAITING, State.RUNNING) or not self.prefix.is_active:
            return False
        size = self.allocator.page_size
        return request.sampling.prompt_logprobs is None and first.computed < (len(request.prompt) - 1) // size * size

    def _fit(self, request: Request) -> Hit | None:
        """What the prefix cache has of a request, or None if there are no pages for all its tokens. A few are left,
        so that nobody has to give way at once."""
        if not self.running:
            return self.prefix.match(request)
        allocator = self.allocator
        promised = sum(max(allocator.pages_for(r.num_tokens) - len(r.pages), 0) for r in self.running)
        room = allocator.num_available - promised - 1 - allocator.num_pages // SPARE
        if self._blocked[0] == request.arrival and room <= self._blocked[1]:
            return None
        hit = self.prefix.match(request)
        missing = allocator.pages_for(request.num_tokens) - sum(map(bool, map(allocator.num_holders, hit.pages)))
        if missing <= room:
            return hit
        self._blocked = request.arrival, room
        return None

    def _enter(self, request: Request, hit: Hit) -> None:
        request.slot = heapq.heappop(self._slots)
        request.state = State.RUNNING
        insort(self.running, request, key=_place)
        self.prefix.take(request, hit)
        self.prefix_queries += request.num_tokens
        self.prefix_hits += request.computed
        if request.num_cached is None:
            request.num_cached = min(request.computed, len(request.prompt))

    def _wait(self, request: Request, state: State) -> None:
        request.state = state
        insort(self.waiting, request, key=_place)

    def _preempt(self, request: Request) -> None:
        self._release(request, False)
        self._wait(request, State.PREEMPTED)
        self.num_preempted += 1

    def _release(self, request: Request, is_over: bool, is_poisoned: bool = False) -> None:
        _take_out(self.running, request)
        self.prefix.leave(request, is_over, is_poisoned)
        self._forget([request.slot])
        heapq.heappush(self._slots, request.slot)


def _place(request: Request) -> tuple[int, int]:
    """In the order of who comes first: of lower priority numbers, then of earlier arrival."""
    return request.priority, request.arrival


def _take_out(line: list[Request], request: Request) -> None:
    """From a line that is in order."""
    at = bisect_left(line, _place(request), key=_place)
    assert line[at] is request, "a request changed its place while it stood in line"
    del line[at]


def _last_step(request: Request) -> int:
    return request.last_step
