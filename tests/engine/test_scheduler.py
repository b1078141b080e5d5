"""Requests and token counts of each step: admission, budgets, chunks, preemption, and no request lost."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.draft_length.policy import FixedLengthPolicy
from foredraft.engine.scheduler import Scheduler, SchedulerLimits
from foredraft.kv.allocator import PageAllocator
from foredraft.request import Batch, Request, RequestStatus
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit
from tests.support.requests import change_options, make_request

PAGE = 4


def request(num_prompt: int, max_tokens: int = 10) -> Request:
    return make_request(-1, range(num_prompt), Sampling(max_tokens=max_tokens))


class Run:
    """A scheduler, and a model whose token is always 7 and whose acceptance `accepts` gives."""

    def __init__(self, num_pages: int = 100, **limits: int) -> None:
        self.forgotten: list[int] = []
        self.scheduler = Scheduler(PageAllocator(num_pages, PAGE), SchedulerLimits(**limits))

    def add(self, *requests: Request) -> None:
        for r in requests:
            self.scheduler.add(r)

    def step(self, num_nodes: int = 0, accepts: int = 0) -> Batch:
        """Run one step and end requests that reached their length, as the engine does."""
        self.forgotten += self.scheduler.preempt(self.scheduler.find_releases().preempted)
        batch = self.scheduler.schedule(num_nodes, FixedLengthPolicy())
        paths, tokens = [], []
        for r, chunk, budget, scored in zip(
            batch.requests, batch.num_new_tokens, batch.granted_nodes, batch.needs_logits, strict=True
        ):
            assert len(r.pages) * PAGE >= r.num_computed + chunk + budget, "no slots for what the step computes"
            known = r.get_tokens(r.num_computed + 1, min(r.num_computed + chunk + 1, r.num_tokens))
            new = [7] * min(1 + min(accepts, budget), r.spec.sampling.max_tokens - len(r.output)) if scored else []
            tokens.append([*known, *new])
            paths.append(list(range(len(tokens[-1]))))
        self.scheduler.commit(batch, Commit.from_lists(paths, tokens))
        for r in batch.requests:
            if len(r.output) >= r.spec.sampling.max_tokens:
                self.forgotten += self.scheduler.finish(r)
        self.scheduler.check_integrity()
        return batch

    def to_end(self, num_nodes: int = 0, accepts: int = 0, most: int = 2000) -> int:
        for step in range(most):
            if not self.scheduler.has_work:
                return step
            assert self.step(num_nodes, accepts).requests, "there is work and no request runs"
        raise AssertionError("it never ends")


def slots(requests: Sequence[Request]) -> list[int]:
    return [r.slot for r in requests]


def test_requests_are_admitted_in_order_up_to_the_batch() -> None:
    run = Run(max_batch=2)
    requests = [request(3) for _ in range(4)]
    run.add(*requests)
    assert list(run.step().requests) == requests[:2]
    assert slots(requests[:2]) == [0, 1]
    run.scheduler.finish(requests[0])
    assert list(run.step().requests) == [requests[1], requests[2]]
    assert requests[2].slot == 0, "the freed slot is given again"


def test_a_long_prompt_is_read_in_chunks_and_drafted_for_only_at_its_end() -> None:
    """Before the last chunk, a draft would start below a token whose successor is committed."""
    run = Run(max_chunk=5)
    r = request(12)
    run.add(r)
    seen = [(b.num_new_tokens[0], b.granted_nodes[0]) for b in (run.step(num_nodes=3) for _ in range(3))]
    assert seen == [(5, 0), (5, 0), (2, 3)]
    assert r.output == [7]
    assert r.num_computed == 12


def test_prompts_and_decoding_share_a_step() -> None:
    run = Run(max_chunk=4)
    first, second = request(2), request(9)
    run.add(first)
    run.step(num_nodes=2)
    run.add(second)
    batch = run.step(num_nodes=2)
    assert batch.num_new_tokens == (1, 4)
    assert batch.granted_nodes == (2, 0)
    assert batch.find_drafting() == [0]


def test_a_step_holds_no_more_tokens_than_its_limit() -> None:
    """Draft nodes count; a request that does not fit runs in the next step."""
    run = Run(max_step_tokens=8)
    run.add(*[request(3) for _ in range(4)])
    while run.scheduler.has_work:
        batch = run.step(num_nodes=4, accepts=1)
        assert 0 < sum(batch.num_new_tokens) + sum(batch.granted_nodes) <= 8


def test_every_request_goes_on_before_any_is_drafted_for() -> None:
    """The older request's draft used to take the whole step, and the others waited until it had ended."""
    run = Run(max_step_tokens=8)
    run.add(*[request(1) for _ in range(4)])
    batch = run.step(num_nodes=7)
    assert batch.num_new_tokens == (1, 1, 1, 1)
    assert sum(batch.granted_nodes) == 4


def test_a_request_with_its_own_draft_length_keeps_it() -> None:
    run = Run()
    requests = [request(2) for _ in range(3)]
    change_options(requests[1], num_speculative_tokens=0)
    change_options(requests[2], num_speculative_tokens=2)
    run.add(*requests)
    assert run.step(num_nodes=5).granted_nodes == (5, 0, 2)


def test_the_last_token_is_not_drafted_for() -> None:
    """It is always the target's own: a draft could only be thrown away."""
    run = Run()
    r = request(2, max_tokens=2)
    run.add(r)
    assert run.step(num_nodes=3).granted_nodes == (3,)
    assert run.step(num_nodes=3).granted_nodes == (0,)


def test_no_page_is_kept_for_rejected_drafts() -> None:
    run = Run()
    r = request(4)
    run.add(r)
    run.step(num_nodes=10, accepts=0)
    assert (r.num_computed, len(r.pages)) == (4, 1)


def test_a_draft_is_given_up_before_anyone_is_preempted() -> None:
    """Three pages: two requests of one page each and one free. A draft of eight does not fit; the texts do. The elder's
    draft used to take the page that the younger needed to go on."""
    run = Run(num_pages=4)
    run.add(request(3, max_tokens=2), request(3, max_tokens=2))
    batch = run.step(num_nodes=8)
    assert batch.granted_nodes == (0, 0)
    run.to_end(num_nodes=8)
    assert run.scheduler.num_preempted == 0


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    """A preempted request frees its pages and its drafter's memory at once, and keeps its text."""
    run = Run(num_pages=6, max_batch=2)
    old, young, waiting = request(8, max_tokens=9), request(7, max_tokens=9), request(1)
    run.add(old, young)
    run.step()
    run.add(waiting)
    while not run.scheduler.num_preempted:
        run.step()
    assert young in run.scheduler.waiting
    assert run.scheduler.waiting[0] is young
    assert young.output, "it had said something"
    assert young.num_computed == 0
    assert young.pages == []
    assert 1 in run.forgotten
    run.to_end()
    assert [len(r.output) for r in (old, young, waiting)] == [9, 9, 10]


def test_no_request_starves() -> None:
    """Far more work than memory and batch hold: every request ends, the first to come among the first to end."""
    run = Run(num_pages=9, max_batch=4, max_step_tokens=12, max_chunk=5)
    requests = [request(1 + i % 9, max_tokens=5 + i % 7) for i in range(40)]
    run.add(*requests)
    steps = run.to_end(num_nodes=3, accepts=1)
    assert all(len(r.output) == r.spec.sampling.max_tokens for r in requests)
    assert run.scheduler.num_preempted > 0
    assert steps < 600
    assert run.scheduler.allocator.num_used == 0


def test_a_request_can_be_taken_out_wherever_it_is() -> None:
    """Running, waiting, preempted, or gone already."""
    run = Run(num_pages=6, max_batch=2)
    requests = [request(7, max_tokens=9), request(7, max_tokens=9), request(2)]
    run.add(*requests)
    while not run.scheduler.num_preempted:
        run.step()
    for r in requests[::-1]:
        run.scheduler.finish(r)
        run.scheduler.finish(r)
        run.scheduler.check_integrity()
    assert not run.scheduler.has_work
    assert run.scheduler.allocator.num_used == 0


@given(
    prompts=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12),
    num_pages=st.integers(9, 30),
    max_batch=st.integers(1, 6),
    max_step_tokens=st.integers(1, 30),
    max_chunk=st.integers(1, 9),
    moves=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 30)), max_size=50),
)
def test_nothing_is_lost_whatever_happens(
    prompts: list[tuple[int, int]],
    num_pages: int,
    max_batch: int,
    max_step_tokens: int,
    max_chunk: int,
    moves: list[tuple[int, int, int]],
) -> None:
    """Pages and slots are conserved after every step, through aborts and any mix of accepted and rejected drafts."""
    run = Run(num_pages, max_batch=max_batch, max_step_tokens=max_step_tokens, max_chunk=max_chunk)
    requests = [request(n, max_tokens=m) for n, m in prompts]
    run.add(*requests)
    aborted = set()
    for num_nodes, accepts, victim in moves:
        run.step(num_nodes, accepts)
        if victim < len(requests) and num_nodes == 0:
            run.scheduler.finish(requests[victim])
            aborted.add(victim)
            run.scheduler.check_integrity()
    run.to_end(num_nodes=3, accepts=2)
    assert all(len(r.output) == r.spec.sampling.max_tokens for i, r in enumerate(requests) if i not in aborted)
    assert run.scheduler.allocator.num_used == 0


@pytest.mark.parametrize("page", [1, 2])
def test_integrity_notices_a_lost_page(page: int) -> None:
    """The check itself has teeth."""
    run = Run()
    r = request(6)
    run.add(r)
    run.scheduler.schedule(0, FixedLengthPolicy())
    del r.pages[-page:]
    with pytest.raises(AssertionError, match="used page"):
        run.scheduler.check_integrity()


def test_a_long_prompt_holds_up_streams_by_no_more_than_a_chunk() -> None:
    """However many prompts there are; the older is read before the younger. Alone they take the whole step."""
    run = Run(max_chunk=6, max_step_tokens=40)
    prompts = [request(30) for _ in range(3)]
    run.add(*prompts)
    assert run.step().num_new_tokens == (6, 6, 6)
    run.add(stream := request(2, max_tokens=60))
    run.step()
    while any(not p.output for p in prompts):
        batch = run.step()
        assert stream in batch.requests
        reading = [(r, n) for r, n in zip(batch.requests, batch.num_new_tokens, strict=True) if n > 1]
        assert sum(n for _, n in reading) <= 6
        assert [r.arrival_index for r, _ in reading] == sorted(r.arrival_index for r, _ in reading)


def test_drafts_get_what_streams_and_prompts_leave() -> None:
    run = Run(max_chunk=6, max_step_tokens=10)
    run.add(request(2), request(2))
    run.step()
    run.add(request(30))
    batch = run.step(num_nodes=5)
    assert batch.num_new_tokens == (1, 1, 6)
    assert batch.granted_nodes == (2, 0, 0)


def test_lower_priority_numbers_run_first_and_give_way_last() -> None:
    run = Run(num_pages=8, max_batch=3)
    late, early, middle = (request(7, max_tokens=9) for _ in range(3))
    for one, priority in ((late, 5), (early, -1), (middle, 2)):
        change_options(one, priority=priority)
    run.add(late)
    run.step()
    run.add(early, middle)
    ended = []
    while run.scheduler.has_work:
        batch = run.step()
        assert batch.requests, "there is work and no request runs"
        ended += [r for r in batch.requests if r.status is RequestStatus.FINISHED]
        if late.status is RequestStatus.PREEMPTED:
            assert run.scheduler.waiting[-1] is late
    assert run.scheduler.num_preempted > 0
    assert ended == [early, middle, late]


def test_a_preempted_request_returns_to_its_place() -> None:
    run = Run(max_batch=2)
    requests = [request(3) for _ in range(4)]
    run.add(*requests)
    run.step()
    assert run.scheduler.preempt([requests[1]]) == [1]
    assert run.scheduler.waiting == requests[1:]
    assert list(run.step().requests) == requests[:2]


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3, 7])
def test_everyone_moves_within_a_bounded_number_of_steps(max_step_tokens: int) -> None:
    """Streams and prompts alternate even if a step has fewer tokens than requests."""
    run = Run(num_pages=2000, max_batch=8, max_step_tokens=max_step_tokens, max_chunk=3)
    requests = [request(1 + 5 * i, max_tokens=900) for i in range(8)]
    run.add(*requests)
    last: dict[Request, int] = {}
    for step in range(400):
        batch = run.step(num_nodes=3)
        assert sum(batch.num_new_tokens) + sum(batch.granted_nodes) <= max_step_tokens
        last |= dict.fromkeys(batch.requests, step)
        assert all(step - last.get(r, 0) <= 80 for r in requests)
    assert all(r.output for r in requests)


def test_only_some_run_and_no_request_is_admitted_beside_them() -> None:
    run = Run(max_batch=4)
    requests = [request(3) for _ in range(3)]
    run.add(*requests)
    run.step()
    run.add(request(3))
    some = frozenset(requests[1:])
    batch = run.scheduler.schedule(0, FixedLengthPolicy(), some)
    assert frozenset(batch.requests) == some
    assert len(run.scheduler.waiting) == 1
    assert len(run.step().requests) == 4


def test_who_comes_in_does_not_have_to_go_at_once() -> None:
    """A prompt is admitted if there are pages for all of it, after those reserved for other requests."""
    run = Run(num_pages=13, max_batch=4, max_chunk=4)
    run.add(request(24, max_tokens=2), request(24, max_tokens=2), request(24, max_tokens=2))
    run.step()
    assert len(run.scheduler.running) == 1
    run.to_end()
    assert run.scheduler.num_preempted == 0
