"""Scheduler, allocator and prefix cache together, over memory that records for which sequence every slot was written.

Guards against pages lost or shared by mistake, a write to pages that others read, a hit with the content of another,
draft memory taken for right that is not, tokens that were never committed being found, and requests that stand still.
"""

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foredraft.draft_length.policy import FixedLengthPolicy
from foredraft.engine.scheduler import Scheduler, SchedulerLimits
from foredraft.kv.allocator import PageAllocator
from foredraft.kv.draft_kv import DraftKV
from foredraft.kv.pool import KVPool, get_slot
from foredraft.kv.prefix_cache import PrefixCache
from foredraft.request import Batch, Request, RequestStatus
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit
from tests.support.requests import make_request

PAGE = 4
OPENING = [5, 6, 7, 8, 5, 6, 7, 8, 9, 9]  # shared opening; its pages repeat: only the chain differs


class World:
    """A model with random tokens, and pools that record the sequence each slot was written for."""

    def __init__(self, num_pages: int, kind: str, is_shared: bool = True, **limits: int) -> None:
        self.target: dict[int, tuple[int, ...]] = {}
        self.draft: dict[int, tuple[int, ...]] = {}
        self.kind = kind
        self._memory: DraftKV | None = None
        if kind != "none":
            ahead = int(kind == "states")
            self._memory = DraftKV(
                KVPool(), token_lookahead=ahead, is_rebuildable_from_tokens=not ahead, flush=self._settle
            )
        self.allocator = PageAllocator(num_pages, PAGE)
        self.prefix = PrefixCache(self.allocator, self, is_shared)
        self.scheduler = Scheduler(self.allocator, SchedulerLimits(**limits), self.prefix)
        self.dice = random.Random(0)
        self.requests: list[Request] = []

    # what the engine does around the scheduler

    @property
    def draft_kv(self) -> DraftKV | None:
        return self._memory

    def flush(self, slots: Sequence[int]) -> None:
        if self._memory is not None:
            self._memory.flush(slots)

    def _settle(self, slots: Sequence[int]) -> None:
        for request in self.requests:
            if request.status is RequestStatus.RUNNING and request.slot in slots and self.kind == "states":
                self.read_states(request)

    def _forget(self, slots: Sequence[int]) -> None:
        for gone in slots:
            if self._memory is not None:
                self._memory.num_valid.pop(gone, None)

    # the life of requests

    def add(
        self, prompt: list[int], max_tokens: int = 8, prompt_logprobs: int | None = None, **spec: object
    ) -> Request:
        sampling = Sampling(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        request = make_request(-1, prompt, sampling, **spec)  # type: ignore[arg-type]
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def preempt(self, *requests: Request) -> None:
        self.flush([r.slot for r in requests if self.prefix.keeps_pages(r, is_finished=False)])
        self._forget(self.scheduler.preempt(requests))

    def finish(self, request: Request, has_invalid_kv: bool = False) -> None:
        if not has_invalid_kv:
            self.flush(self.scheduler.find_unwritten_slots([request]))
        self._forget(self.scheduler.finish(request, has_invalid_kv))

    def schedule(self, num_nodes: int, only: frozenset[Request] | None = None) -> Batch:
        releases = self.scheduler.find_releases(only)
        self.flush(releases.unwritten_slots)
        self._forget(self.scheduler.preempt(releases.preempted))
        return self.scheduler.schedule(num_nodes, FixedLengthPolicy(), only)

    def reset(self) -> None:
        live = (*self.scheduler.running, *self.scheduler.waiting)
        self.scheduler.reset({r: len(r.output) for r in live})
        self._forget(range(self.scheduler.limits.max_batch))
        self.target.clear()
        self.draft.clear()

    def step(self, num_nodes: int = 0, only: frozenset[Request] | None = None, failing: Request | None = None) -> Batch:
        batch = self.schedule(num_nodes, only)
        for request in self.scheduler.running:
            self.check_memory(request)
        paths, tokens, failed = [], [], set()
        for b, r in enumerate(batch.requests):
            path, new = self._pass(batch, b)
            if r is failing:
                failed.add(b)
                path, new = [], []
            paths.append(path)
            tokens.append(new)
        commit = Commit.from_lists(paths, tokens, failed=frozenset(failed))
        if self._memory is not None:
            self._draft(batch, commit)
        self.scheduler.commit(batch, commit)
        for b, r in enumerate(batch.requests):
            if b in failed or len(r.output) >= r.spec.sampling.max_tokens:
                self.finish(r, has_invalid_kv=b in failed)
        self.scheduler.check_integrity()
        return batch

    def _pass(self, batch: Batch, b: int) -> tuple[list[int], list[int]]:
        """Simulate the target's pass over a chunk and a draft: the tokens it writes and the part that is kept."""
        r, chunk, budget = batch.requests[b], batch.num_new_tokens[b], batch.granted_nodes[b]
        text = r.tokens[: r.num_computed + chunk]
        drafted = [self.dice.randrange(5, 8) for _ in range(budget)]
        assert len(r.pages) * PAGE >= len(text) + budget, "no slots for what the step computes"
        for position in range(r.num_computed, len(text) + budget):
            page = r.pages[position // PAGE]
            assert self.allocator.num_holders(page) == 1, "written while others hold it"
            assert not self.allocator.is_cacheable(page), "written while it may be found"
            self.target[get_slot(r.pages, position, PAGE)] = tuple([*text, *drafted][: position + 1])
        known = r.get_tokens(r.num_computed + 1, min(len(text) + 1, r.num_tokens))
        if not batch.needs_logits[b]:
            return list(range(chunk)), known
        accepted = drafted[: self.dice.randint(0, min(budget, max(r.max_draft_depth, 0)))]
        last = [self.dice.randrange(5, 8)]  # may be what was drafted, and follows what was kept all the same
        return list(range(chunk + len(accepted))), [*known, *accepted, *last][: chunk + len(accepted)]

    def _draft(self, batch: Batch, commit: Commit) -> None:
        """Draft as the two kinds of drafters do: one reads tokens when it drafts, the other queues every pass."""
        assert self._memory is not None
        for b, r in enumerate(batch.requests):
            if self.kind == "tokens" and batch.granted_nodes[b] > 0 and self.dice.random() < 0.7:
                for position in range(self._memory.num_valid.get(r.slot, 0), r.num_tokens):
                    self.draft[get_slot(r.pages, position, PAGE)] = tuple(r.tokens[: position + 1])
                self._memory.num_valid[r.slot] = r.num_tokens
            if self.kind == "states" and self.dice.random() < 0.3:
                self.read_states(r)

    def read_states(self, r: Request) -> None:
        """Pairs up to the last that a pass has shown."""
        assert self._memory is not None
        for position in range(self._memory.num_valid.get(r.slot, 0), r.num_computed):
            page = r.pages[position // PAGE]
            is_own = self.prefix._index.writers.get(page) in (None, r)
            assert is_own or self.allocator.num_holders(page) == 1, "written while others read it"
            self.draft[get_slot(r.pages, position, PAGE)] = tuple(r.tokens[: position + 2])
        self._memory.num_valid[r.slot] = max(self._memory.num_valid.get(r.slot, 0), r.num_computed)

    def check_memory(self, r: Request) -> None:
        """Everything that counts as computed was computed for this very text."""
        text = r.tokens
        for position in range(r.num_computed):
            assert self.target[get_slot(r.pages, position, PAGE)] == tuple(text[: position + 1])
        if self._memory is not None:
            ahead = self._memory.token_lookahead
            valid = self._memory.num_valid.get(r.slot, 0)
            assert self._memory.is_rebuildable_from_tokens or valid <= r.num_computed
            for position in range(valid):
                assert self.draft[get_slot(r.pages, position, PAGE)] == tuple(text[: position + 1 + ahead])

    def to_end(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            assert self.step(2).requests, "there is work and no request runs"
        raise AssertionError("it never ends")


KINDS = ("none", "tokens", "states")


class Lives(RuleBasedStateMachine):
    """Requests that come, run, are aborted, preempted, or fail, in little memory."""

    @initialize(
        num_pages=st.integers(12, 24),
        kind=st.sampled_from(KINDS),
        is_shared=st.booleans(),
        max_batch=st.integers(1, 5),
        max_step_tokens=st.integers(1, 24),
        max_chunk=st.integers(1, 9),
    )
    def begin(self, num_pages: int, kind: str, is_shared: bool, **limits: int) -> None:
        self.world = World(num_pages, kind, is_shared, **limits)

    @rule(
        shared=st.integers(0, len(OPENING)),
        own=st.lists(st.integers(5, 7), min_size=1, max_size=9),
        max_tokens=st.integers(1, 16),
        samples=st.integers(1, 3),
        priority=st.integers(0, 2),
        salt=st.sampled_from([b"", b"", b"a"]),
    )
    def arrive(self, shared: int, own: list[int], max_tokens: int, samples: int, priority: int, salt: bytes) -> None:
        first = None
        for sample in range(samples):
            request = self.world.add(
                OPENING[:shared] + own,
                max_tokens,
                options=RequestOptions(priority=priority, salt=salt),
                page_salt=salt,
                waits_for=first,
                sample_index=sample,
            )
            first = first or request

    @rule(num_nodes=st.integers(0, 6), times=st.integers(1, 4))
    def step(self, num_nodes: int, times: int) -> None:
        for _ in range(times):
            self.world.step(num_nodes)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.world.finish(data.draw(st.sampled_from(self.world.requests)))

    @precondition(lambda self: self.world.scheduler.running)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.world.step(2, failing=data.draw(st.sampled_from(self.world.scheduler.running)))

    @precondition(lambda self: self.world.scheduler.running)
    @rule()
    def preempt(self) -> None:
        self.world.preempt(self.world.scheduler.running[-1])

    @precondition(lambda self: self.world.scheduler.running)
    @rule(data=st.data())
    def some_run_alone(self, data: st.DataObject) -> None:
        some = data.draw(st.sets(st.sampled_from(self.world.scheduler.running)))
        batch = self.world.step(2, only=frozenset(some))
        assert set(batch.requests) <= some

    @rule()
    def device_error(self) -> None:
        self.world.schedule(3)  # and the pass raises
        self.world.reset()
        assert self.world.allocator.num_free == self.world.allocator.num_pages - 1

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check_integrity()
            for request in self.world.scheduler.running:
                self.world.check_memory(request)

    def teardown(self) -> None:
        """After any history, every remaining request can end."""
        if hasattr(self, "world"):
            self.world.to_end()
            assert self.world.allocator.num_used == 0
            assert all(r.status is RequestStatus.FINISHED for r in self.world.requests)


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.soak
class TestManyLives(Lives.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=10_000, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_busy_life_has_hits_and_preemptions(kind: str) -> None:
    """The machine above would hold of a cache that never finds anything."""
    world = World(16, kind, max_batch=4, max_step_tokens=20, max_chunk=6)
    dice = random.Random(1)
    for index in range(120):
        own = [dice.randrange(5, 8) for _ in range(dice.randint(1, 12))]
        world.add(OPENING[: dice.choice([0, 6, 8, 10])] + own, dice.randint(1, 24))
        for _ in range(4):
            world.step(index % 4)
    world.to_end()
    assert world.scheduler.num_preempted > 10
    assert world.scheduler.prefix_hits > 200
    assert world.scheduler.prefix_hits < world.scheduler.prefix_queries


def test_samples_wait_for_the_first_and_find_its_prompt() -> None:
    """They also delay no request behind them."""
    world = World(60, "none", max_batch=6, max_step_tokens=50, max_chunk=4)
    first = world.add(OPENING, 4)
    others = [world.add(OPENING, 4, waits_for=first) for _ in range(2)]
    stranger = world.add([1, 2, 3], 4)
    for _ in range(2):
        batch = world.step()
        assert not set(others) & set(batch.requests)
    assert stranger.output
    world.step()
    assert all(r.status is RequestStatus.RUNNING for r in others)
    assert [r.num_cached_tokens for r in others] == [8, 8]
    assert others[0].pages[:2] == first.pages[:2]
    assert (first.num_cached_tokens, stranger.num_cached_tokens) == (0, 0)


def test_samples_wait_no_longer_for_one_that_is_gone() -> None:
    world = World(60, "none", max_batch=6, max_step_tokens=50, max_chunk=4)
    first = world.add(OPENING, 4)
    other = world.add(OPENING, 4, waits_for=first)
    world.step()
    assert other.status is RequestStatus.WAITING
    world.finish(first)
    assert other in world.step().requests
    assert other.num_cached_tokens == 4
    world.to_end()


def test_without_sharing_samples_still_share_and_nothing_stays() -> None:
    """Another salt keeps a prompt apart; pages are freed with their last holder."""
    world = World(60, "none", is_shared=False, max_batch=6)
    for salt in (b"one", b"two"):
        first = world.add(OPENING, 4, page_salt=salt)
        other = world.add(OPENING, 4, page_salt=salt, waits_for=first)
        world.to_end()
        assert (first.num_cached_tokens, other.num_cached_tokens) == (0, 8)
    assert world.allocator.num_cached == 0


def test_a_preempted_request_finds_its_own_pages() -> None:
    world = World(60, "states", max_batch=6)
    request = world.add(OPENING, 12)
    for _ in range(6):
        world.step(0)
    computed = request.num_computed
    world.preempt(request)
    assert (request.num_computed, world.allocator.num_used) == (0, 0)
    batch = world.step(0)
    assert batch.num_new_tokens[0] == computed + 1 - computed // PAGE * PAGE
    assert request.num_cached_tokens == 0, "of its first admission"
    world.to_end()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_request_leaves_nothing_to_find(kind: str) -> None:
    """Its pages and its hits are dropped, except those that another request holds."""
    world = World(60, kind, max_batch=6)
    world.add(OPENING, 1)
    world.to_end()
    failing = world.add([*OPENING, 1, 2, 3, 4, 5], 9)
    world.step(0)
    assert failing.num_cached_tokens == 8
    world.step(0, failing=failing)
    assert world.allocator.num_cached == 0
    again = world.add([*OPENING, 1, 2, 3, 4, 5], 2)
    world.to_end()
    assert again.num_cached_tokens == 0


def test_what_a_failed_request_wrote_is_dropped_though_others_hold_it() -> None:
    world = World(60, "none", max_batch=6)
    failing = world.add(OPENING, 9)
    world.step(0)
    other = world.add(OPENING, 9)
    world.step(0)
    assert other.num_cached_tokens == 8
    world.step(0, failing=failing)
    world.finish(other)
    assert world.add(OPENING, 1).num_cached_tokens is None
    world.step(0)
    assert world.requests[-1].num_cached_tokens == 0
    world.to_end()


def test_an_aborted_prompt_leaves_what_it_had_read() -> None:
    world = World(60, "states", max_batch=6, max_chunk=6)
    request = world.add([*OPENING, *range(20, 40)], 9)
    world.step(0)
    world.step(0)
    world.finish(request)
    world.scheduler.check_integrity()
    again = world.add([*OPENING, *range(20, 40)], 2)
    world.step(0)
    assert again.num_cached_tokens == 12
    world.to_end()


def test_a_reset_forgets_everything_and_everyone_goes_on() -> None:
    world = World(60, "tokens", max_batch=3)
    requests = [world.add([*OPENING, i], 9) for i in range(5)]
    for _ in range(3):
        world.step(2)
    outputs = [list(r.output) for r in requests]
    world.reset()
    assert world.scheduler.waiting == requests
    assert world.allocator.num_free == 59
    assert not world._memory.num_valid  # type: ignore[union-attr]
    world.to_end()
    assert [r.output[: len(o)] for r, o in zip(requests, outputs, strict=True)] == outputs
