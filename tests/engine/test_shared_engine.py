"""One LLM in several threads and event loops: the texts are those of plain decoding, and nothing is left behind.

Guards against a step by two threads at once (which crashed), a thread that waits while others keep the engine, an error
that reaches unaffected callers, an event loop that is blocked, and streams that are abandoned.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import cache
from typing import Any

import pytest
import torch

from foredraft import LLM, ForedraftError, Sampling
from tests.engine.test_worker import running
from tests.engine.test_worker_faults import FaultyLM, culprit_of
from tests.support import tiny_models
from tests.support.method_cases import METHOD_CASES

PROMPTS = [[n % 50 + 1, n % 7 + 5, n % 3 + 2] for n in range(12)]
SAMPLINGS = [
    Sampling(max_tokens=24, temperature=0, ignore_eos=True),
    Sampling(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True),
    Sampling(max_tokens=16, temperature=0.9, seed=5, n=2),
]
LONG = Sampling(max_tokens=60, temperature=0, ignore_eos=True)
HANG = 60.0  # seconds until a thread is taken to hang


def sampling(n: int) -> Sampling:
    return SAMPLINGS[n % len(SAMPLINGS)]


@cache
def plain(n: int) -> list[list[int]]:
    return [c.token_ids for c in tiny_models.plain().generate(PROMPTS[n], sampling(n))]


def make_llm(method: str | None = None) -> LLM:
    return tiny_models.plain().with_drafter(None if method is None else METHOD_CASES[method].make(3), verify="match")


def texts(llm: LLM, n: int) -> list[list[int]]:
    return [c.token_ids for c in llm.generate(PROMPTS[n], sampling(n))]


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """Run each job in a thread and return its result or exception. Fails if one does not return."""
    results: list[Any] = [None] * len(jobs)

    def run(n: int) -> None:
        try:
            results[n] = jobs[n]()
        except BaseException as error:
            results[n] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive(), "a thread waits for ever"
    return results


@pytest.mark.parametrize("method", [None, "draft_model", "eagle", "suffix"])
def test_threads_that_share_an_llm_get_the_texts_of_plain_decoding(method: str | None) -> None:
    llm = make_llm(method)
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(lambda n: texts(llm, n), range(len(PROMPTS)))) == [plain(n) for n in range(len(PROMPTS))]
    assert not llm.engine.has_work


def test_threads_event_loops_and_streams_share_one_llm() -> None:
    llm = make_llm("draft_model")

    async def many() -> list[list[list[int]]]:
        found = await asyncio.gather(*(llm.agenerate(PROMPTS[n], sampling(n)) for n in range(6)))
        return [[c.token_ids for c in done] for done in found]

    stream = llm.stream(PROMPTS[0], LONG)
    first = next(stream).token_ids
    loops, threads, other = in_threads(
        lambda: asyncio.run(many()),
        lambda: [texts(llm, n) for n in range(4)],
        lambda: asyncio.run(many()),
    )
    assert loops == other == [plain(n) for n in range(6)]
    assert threads == [plain(n) for n in range(4)]
    rest = [token for delta in stream for token in delta.token_ids]
    assert [*first, *rest] == tiny_models.plain().generate(PROMPTS[0], LONG)[0].token_ids


def test_streams_of_several_threads_go_on_together() -> None:
    """They run in one batch, and none of them waits for the end of another."""
    llm, order, start = make_llm(), list[int](), threading.Barrier(3)

    def read(n: int) -> None:
        for delta in llm.stream(PROMPTS[n], LONG):
            if not order.count(n):
                start.wait(HANG)  # all have begun
            order.append(n)
            assert delta.text == ""

    assert in_threads(*(lambda n=n: read(n) for n in range(3))) == [None] * 3  # type: ignore[misc]
    assert all(order.count(n) == 60 for n in range(3))
    for n in range(3):
        ahead = [max(order[:at].count(other) for other in range(3)) for at, who in enumerate(order) if who == n]
        assert all(others - mine < 40 for mine, others in enumerate(ahead)), "a thread was kept waiting"


def test_an_error_goes_to_the_thread_whose_step_it_was_and_the_request_at_fault_meets_its_own() -> None:
    """Unaffected callers lose at most one request in all. The caller of the bad request always gets the error."""
    llm = make_llm()
    llm.engine.target = FaultyLM(llm.engine.target, culprit_of({96}))  # type: ignore[assignment]
    calm = Sampling(max_tokens=30, temperature=0, ignore_eos=True, logit_bias={96: -100.0})
    expected = [tiny_models.plain().generate(PROMPTS[n], calm)[0].token_ids for n in range(4)]

    def good(n: int) -> list[int]:
        return llm.generate(PROMPTS[n], calm)[0].token_ids

    found = in_threads(*(lambda n=n: good(n) for n in range(4)), lambda: llm.generate([96, 5], calm))  # type: ignore[misc]
    assert isinstance(found[-1], RuntimeError)
    failed = [result for result in found[:-1] if isinstance(result, BaseException)]
    assert len(failed) <= 1
    assert all(result == expected[n] for n, result in enumerate(found[:-1]) if result not in failed)
    assert not llm.engine.has_work
    assert good(1) == expected[1]


def test_after_an_error_each_other_stream_runs_alone_until_it_has_a_token() -> None:
    """One thread fixes the order: the first stream meets the error, and the third causes it."""
    llm = make_llm()
    calm = Sampling(max_tokens=12, temperature=0, ignore_eos=True, logit_bias={96: -100.0})
    first, second, bad = (llm.stream(prompt, calm) for prompt in (PROMPTS[0], PROMPTS[1], [96, 5]))
    next(first)
    tokens = list(next(second).token_ids)
    next(bad)
    reads_bad = culprit_of({96})
    fails = lambda window: reads_bad(window) or (RuntimeError("together") if len(window.spans) == 3 else None)  # noqa: E731
    llm.engine.target = FaultyLM(llm.engine.target, fails)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="together"):
        list(first)
    tokens += [token for delta in second for token in delta.token_ids]
    assert tokens == tiny_models.plain().generate(PROMPTS[1], calm)[0].token_ids
    with pytest.raises(RuntimeError, match="token"):
        next(bad)
    assert not llm.engine.has_work


def test_leaving_an_async_stream_early_or_cancelling_it_aborts_what_is_left() -> None:
    llm = make_llm()

    async def main() -> None:
        async with aclosing(llm.astream(PROMPTS[:3], LONG)) as deltas:
            async for _ in deltas:
                break
        assert not llm.engine.has_work
        task = asyncio.create_task(llm.agenerate(PROMPTS[:2], LONG))
        while not llm.engine.has_work:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not llm.engine.has_work
        with pytest.raises(ForedraftError, match="outside the vocabulary"):
            await llm.agenerate([[4000]])

    asyncio.run(main())


def test_the_event_loop_turns_while_a_step_is_under_way() -> None:
    llm = make_llm()
    turned, blocked = threading.Event(), []

    def fails(window: object) -> None:
        blocked.append(not turned.wait(HANG))

    llm.engine.target = FaultyLM(llm.engine.target, fails)  # type: ignore[assignment, arg-type]

    async def main() -> None:
        task = asyncio.create_task(llm.agenerate(PROMPTS[0], SAMPLINGS[0]))
        while not llm.engine.has_work:
            await asyncio.sleep(0)
        turned.set()  # from the loop, which the step that waits for it does not hold up
        await task

    asyncio.run(main())
    assert not any(blocked)


def test_an_llm_belongs_to_its_worker_while_that_runs() -> None:
    llm = make_llm()
    stream = llm.stream(PROMPTS[0], LONG)
    with running(llm):  # type: ignore[arg-type]
        for use in (lambda: llm.generate(PROMPTS[0]), lambda: next(stream), llm.calibrate, llm.close):
            with pytest.raises(ForedraftError, match="a Worker runs this LLM"):
                use()
        with pytest.raises(ForedraftError, match="another Worker"), running(llm):  # type: ignore[arg-type]
            pass
    assert texts(llm, 0) == plain(0)
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    with pytest.raises(ForedraftError, match="unfinished streams"), running(llm):  # type: ignore[arg-type]
        pass
    stream.close()


def test_a_stream_that_is_dropped_in_the_middle_of_another_step_is_ended_after_it() -> None:
    """As the cyclic collector may do it, at any line, on the thread that steps."""
    llm = make_llm()
    dropped = llm.stream(PROMPTS[1], LONG)
    next(dropped)

    def drop(window: object) -> None:
        dropped.close()

    llm.engine.target = FaultyLM(llm.engine.target, drop)  # type: ignore[assignment, arg-type]
    [(found,)] = in_threads(lambda: texts(llm, 0))
    assert [found] == plain(0)
    assert not llm.engine.has_work


@pytest.mark.parametrize("is_ours", [True, False], ids=["native", "modules"])
def test_llms_on_the_same_weights_run_at_the_same_time(is_ours: bool) -> None:
    """Each has its own memory; drafters that read the target's states or draft in its memory see only those."""
    model = tiny_models.llama(hidden=64).to(torch.float32)
    plain_llm = LLM(model, None, fused=is_ours)
    llms = [
        plain_llm,
        *(plain_llm.with_drafter(spec, verify="match") for spec in ("early_exit", "early_exit", "ngram")),
    ]
    expected = [[c.token_ids for c in plain_llm.generate(prompt, LONG)] for prompt in PROMPTS[:3]]

    def run(llm: LLM) -> list[list[list[int]]]:
        return [[c.token_ids for c in llm.generate(prompt, LONG)] for prompt in PROMPTS[:3]]

    assert in_threads(*(lambda llm=llm: run(llm) for llm in llms)) == [expected] * len(llms)  # type: ignore[misc]


def test_hooks_of_one_llm_see_no_pass_of_another() -> None:
    """Drafters on the states of one set of modules, in three threads: none fails, and texts are plain."""
    llms = [make_llm("eagle"), make_llm("medusa"), make_llm()]
    found = in_threads(*(lambda llm=llm: [texts(llm, n) for n in range(4)] for llm in llms))  # type: ignore[misc]
    assert found == [[plain(n) for n in range(4)]] * 3
    assert not any(llm.engine.drafter.num_failures for llm in llms)
