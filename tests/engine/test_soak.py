"""Many requests through a pool that is too small, many of them aborted: no wrong text, no lost page, no growing memory.

The long ones: `make soak`, or `pytest -m soak -s tests/engine/test_soak.py` to see the figures.
"""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from foredraft.draft_length.adaptive import AdaptiveLengthPolicy
from foredraft.draft_length.policy import DraftLengthPolicy
from foredraft.engine.worker import Worker
from foredraft.llm import LLM
from tests.support import tiny_models
from tests.support.engine_soak import IN_FLIGHT, LIMITS, RandomLengthPolicy, SoakChecker, SoakRequest, generate_requests
from tests.support.method_cases import METHOD_CASES

METHODS = ["draft_model", "eagle, tree", "ngram"]
LENGTHS: dict[str, Callable[[], DraftLengthPolicy]] = {"restless": RandomLengthPolicy, "adaptive": AdaptiveLengthPolicy}
SHORT = [*((method, "restless") for method in METHODS), ("draft_model", "adaptive")]
MEGABYTE = 1 << 20


def make_llm(method: str, lengths: str) -> LLM:
    llm = tiny_models.limit_memory(tiny_models.plain(), METHOD_CASES[method].make(4), LIMITS)
    llm.engine.length_policy = LENGTHS[lengths]()
    return llm


def step_all(llm: LLM, count: int) -> SoakChecker:
    """Step the engine in this thread, with IN_FLIGHT requests in it as long as there are any."""
    judge, waiting, engine = SoakChecker(count), generate_requests(count), llm.engine
    live: list[tuple[SoakRequest, object, int]] = []  # case, transcript, steps so far
    is_over = False
    while live or not is_over:
        while not is_over and len(live) < IN_FLIGHT:
            case = next(waiting, None)
            is_over = case is None
            if case is not None:
                [transcript] = llm.prepare(case.prompt, case.sampling)
                engine.add(transcript)
                live.append((case, transcript, 0))
        engine.step()
        for case, transcript, steps in live:
            is_due = steps >= case.patience if case.abort_at == 0 else transcript.num_tokens >= (case.abort_at or 1e9)
            if is_due and not transcript.is_finished:
                engine.abort(transcript.request)
            if transcript.is_finished:
                judge.record(transcript, transcript.deltas[-1].completion)
        live = [(case, transcript, steps + 1) for case, transcript, steps in live if not transcript.is_finished]
    transcript = None
    judge.check_end(engine)
    return judge


def through_worker(llm: LLM, count: int) -> SoakChecker:
    """Run the worker with IN_FLIGHT clients that each send one request after another."""
    judge, waiting, worker = SoakChecker(count), generate_requests(count), Worker(llm)
    worker.start()
    try:
        asyncio.run(_clients(llm, worker, waiting, judge))
        assert worker.is_healthy
    finally:
        worker.stop()
    judge.check_end(llm.engine)
    return judge


async def _clients(llm: LLM, worker: Worker, waiting: Iterator[SoakRequest], judge: SoakChecker) -> None:
    async def client() -> None:
        for case in waiting:
            await _ask(llm, worker, case, judge)

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(client())
    assert await worker.drain(timeout=60)


async def _ask(llm: LLM, worker: Worker, case: SoakRequest, judge: SoakChecker) -> None:
    [transcript] = llm.prepare(case.prompt, case.sampling)
    stream = await worker.submit([transcript])
    if case.abort_at == 0:
        await asyncio.sleep(case.patience / 1000)  # while it waits, runs, or reads its prompt: whatever comes first
        stream.cancel()
    seen = 0
    async for delta in stream:
        seen += len(delta.token_ids)
        if case.abort_at and seen >= case.abort_at:
            stream.cancel()
        if delta.completion is not None:
            judge.record(transcript, delta.completion)


def check(judge: SoakChecker, lengths: str, preempted: int, least: int) -> None:
    assert judge.finished + judge.aborted == judge.count
    assert judge.aborted >= 0.25 * judge.count
    if lengths == "restless":  # what adapts may find that drafts do not pay
        assert judge.accepted > 0
        assert judge.rejected > 0
    assert preempted >= least, f"{preempted} preemptions: the pool is too large for this test"


@pytest.mark.parametrize(
    ("method", "lengths"), [*((method, "restless") for method in METHODS), ("draft_model", "adaptive")]
)
def test_sixty_requests_in_a_pool_too_small(method: str, lengths: str) -> None:
    llm = make_llm(method, lengths)
    judge = step_all(llm, 60)
    check(judge, lengths, llm.engine.scheduler.num_preempted, 3)


def test_sixty_requests_through_a_worker() -> None:
    llm = make_llm("draft_model", "restless")
    check(through_worker(llm, 60), "restless", llm.engine.scheduler.num_preempted, 3)


def test_a_wrong_token_is_seen() -> None:
    """Check of the check: one token changed anywhere in an output is found."""
    llm = tiny_models.plain()
    case = next(generate_requests(1))
    [transcript] = llm.prepare(case.prompt, case.sampling)
    llm.engine.add(transcript)
    while not transcript.is_finished:
        llm.engine.step()
    completion = transcript.deltas[-1].completion
    SoakChecker(1).record(transcript, completion)
    for place in (0, len(completion.token_ids) - 1):
        completion.token_ids[place] = (completion.token_ids[place] + 1) % tiny_models.VOCAB
        with pytest.raises(AssertionError, match="wrong text"):
            SoakChecker(1).record(transcript, completion)


@pytest.mark.soak
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("method", METHODS)
def test_two_thousand_requests(method: str, lengths: str) -> None:
    _soak(method, lengths, step_all)


@pytest.mark.soak
@pytest.mark.parametrize("method", METHODS)
def test_two_thousand_requests_through_a_worker(method: str) -> None:
    _soak(method, "adaptive", through_worker)


def _soak(method: str, lengths: str, run: Callable[[LLM, int], SoakChecker]) -> None:
    llm = make_llm(method, lengths)
    judge = run(llm, 2000)
    preempted = llm.engine.scheduler.num_preempted
    print(
        f"\n{run.__name__}, {method}, lengths {lengths}: {judge.finished} finished, {judge.aborted} aborted, ", end=""
    )
    print(f"{preempted} preemptions, {judge.accepted} drafted tokens accepted, {judge.rejected} not; memory ", end="")
    print({f"{percent} %": f"{size / MEGABYTE:.1f} MB" for percent, size in judge.memory.items()})
    check(judge, lengths, preempted, 101)
    # what is bounded may still fill: noise keeps a million numbers, and a vocabulary this small takes long to get there
    assert judge.memory[100] <= judge.memory[25] + 12 * MEGABYTE
