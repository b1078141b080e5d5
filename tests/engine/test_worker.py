"""The engine behind a thread: the same texts for every caller, and no state left behind.

Guards against deltas lost or doubled between threads, a client that hangs up and leaves its pages, a reader that stops
and fills the memory, an unbounded queue, and a server that reports health while its engine hangs.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from foredraft import LLM, Completion, Delta, ForedraftError, Sampling
from foredraft.draft_length.policy import StepReport
from foredraft.engine.engine import Engine
from foredraft.engine.stream import Stream, estimate_bytes
from foredraft.engine.transcript import Transcript
from foredraft.engine.worker import DrainingError, EngineObserver, QueueFullError, Worker, WorkerLimits
from foredraft.request import Batch, Request
from foredraft.tree import TokenTree
from tests.support import engine_fakes, tiny_models
from tests.support.engine_fakes import ScriptedDrafter, TableLM

V = 61
LM = TableLM.from_seed(V, seed=3)
GREEDY = Sampling(max_tokens=12, temperature=0)
PROMPTS = [[n % 50 + 1, n % 7 + 5, n % 3 + 2] for n in range(24)]
SAMPLINGS = [
    Sampling(max_tokens=20, temperature=0, ignore_eos=True),
    Sampling(max_tokens=15, seed=5, temperature=0.9, top_p=0.9),
    Sampling(max_tokens=10, seed=6, temperature=0.8, frequency_penalty=0.4, logprobs=2),
    Sampling(max_tokens=12, seed=7, n=3),
]


@dataclass
class FakeLLM:
    engine: Engine


@dataclass
class Notes:
    """Observer that records its calls."""

    num_steps: int = 0
    finished_: list[Transcript] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def on_step(self, requests: Sequence[Request], report: StepReport) -> None:
        self.num_steps += 1

    def on_finish(self, transcript: Transcript) -> None:
        self.finished_.append(transcript)

    def on_failure(self, kind: str) -> None:
        self.failures.append(kind)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """A drafter without drafts that lets the engine go on step by step, and so stands for one that hangs."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)
        self.is_open = False
        self.drafter = ScriptedDrafter(self._propose)

    def _propose(self, batch: Batch) -> TokenTree:
        if not self.is_open:
            self.arrived.release()
            self.passes.acquire()
        return engine_fakes.draft_greedily(LM, batch, 0)

    def open(self) -> None:
        self.is_open = True
        self.passes.release(100)

    async def wait(self) -> None:
        """Until a step is under way."""
        await asyncio.to_thread(self.arrived.acquire)


@contextmanager
def running(
    llm: object,
    limits: WorkerLimits | None = None,
    observer: EngineObserver | None = None,
    clock: Callable[[], float] | None = None,
) -> Iterator[Worker]:
    worker = Worker(llm, limits, observer, clock) if clock else Worker(llm, limits, observer)  # type: ignore[arg-type]
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
        assert_idle(worker.engine)


def assert_idle(engine: Engine) -> None:
    assert not engine.has_work
    assert not engine.transcripts
    assert engine.scheduler.allocator.num_used == 0
    engine.scheduler.check_integrity()


def table(drafter: object = None, **limits: int) -> FakeLLM:
    return FakeLLM(engine_fakes.make_engine(LM, drafter, **limits))  # type: ignore[arg-type]


def make_transcripts(n: int, sampling: Sampling = GREEDY) -> list[Transcript]:
    return [engine_fakes.make_transcript(PROMPTS[n], sampling, n)]


def plain_texts(sampling: Sampling = GREEDY) -> list[list[int]]:
    transcripts = [engine_fakes.make_transcript(prompt, sampling, n) for n, prompt in enumerate(PROMPTS)]
    return [completion.token_ids for completion, _ in engine_fakes.run(engine_fakes.make_engine(LM, None), transcripts)]


PLAIN = plain_texts()
LONG = Sampling(max_tokens=400, temperature=0)


def make_drafting_llm() -> LLM:
    return tiny_models.plain().with_drafter(tiny_models.draft_model(3))


def whole(deltas: list[Delta]) -> Completion:
    """Return the completion of one request; its deltas must add up to it."""
    last = deltas[-1].completion
    assert last is not None
    assert all(delta.completion is None for delta in deltas[:-1])
    assert [token for delta in deltas for token in delta.token_ids] == last.token_ids
    assert "".join(delta.text for delta in deltas) == last.text
    return last


def test_texts_are_those_of_generate_from_any_number_of_event_loops() -> None:
    """Greedy, seeded, penalised, several samples: each text, its pieces and its log-probabilities."""
    plain, llm = tiny_models.plain(), make_drafting_llm()
    jobs = [(prompt, SAMPLINGS[n % 4]) for n, prompt in enumerate(PROMPTS)]
    expected = [plain.generate(prompt, sampling) for prompt, sampling in jobs]
    found: dict[int, list[Completion]] = {}

    async def one(worker: Worker, n: int) -> None:
        prompt, sampling = jobs[n]
        deltas = [delta async for delta in await worker.submit(llm.prepare(prompt, sampling))]
        found[n] = [whole([d for d in deltas if d.index == i]) for i in range(sampling.n)]

    async def some(worker: Worker, which: range) -> None:
        await asyncio.gather(*(one(worker, n) for n in which))

    with running(llm) as worker:
        threads = [threading.Thread(target=asyncio.run, args=(some(worker, range(k, len(jobs), 3)),)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for n, completions in enumerate(expected):
        for ours, theirs in zip(found[n], completions, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert (ours.finish_reason, ours.text, ours.index) == (theirs.finish_reason, theirs.text, theirs.index)
            if theirs.logprobs is not None:
                assert ours.logprobs is not None
                assert [entry.token_id for entry in ours.logprobs] == theirs.token_ids
                assert [e.logprob for e in ours.logprobs] == pytest.approx([e.logprob for e in theirs.logprobs])


def test_completions_come_in_the_order_of_the_transcripts() -> None:
    async def main(worker: Worker) -> list[Completion]:
        transcripts = [engine_fakes.make_transcript(PROMPTS[n], GREEDY, n) for n in range(5)]
        return await (await worker.submit(transcripts)).read_completions()

    with running(table()) as worker:
        assert [c.token_ids for c in asyncio.run(main(worker))] == PLAIN[:5]


def test_cancelling_at_random_points_leaves_nothing_and_disturbs_no_request() -> None:
    """Half of the streams are left after a random number of deltas, some before the first, some twice over."""
    rng = random.Random(0)
    drafter = engine_fakes.make_drafter(LM.perturb(0.3), 3)
    llm = table(drafter, num_pages=60, max_batch=6, max_chunk=2)
    notes = Notes()

    async def one(worker: Worker, n: int, most: int | None) -> None:
        stream = await worker.submit(make_transcripts(n % len(PROMPTS)))
        deltas: list[Delta] = []
        if most == 0:
            stream.cancel()
        async for delta in stream:
            deltas.append(delta)
            if most is not None and len(deltas) >= most:
                stream.cancel()
        done, expected = whole(deltas), PLAIN[n % len(PROMPTS)]
        if most is None:
            assert done.token_ids == expected
        assert done.token_ids == expected[: len(done.token_ids)]
        assert done.finish_reason in ("abort", "length") if most is not None else ("length",)
        stream.cancel()

    async def main(worker: Worker) -> None:
        await asyncio.gather(*(one(worker, n, rng.choice([None, 0, 1, 2, 4])) for n in range(96)))

    with running(llm, observer=notes) as worker:
        asyncio.run(main(worker))
    assert len(notes.finished_) == 96
    reasons = [transcript.finish_reason for transcript in notes.finished_]
    assert min(reasons.count("abort"), reasons.count("length")) > 10
    assert not drafter.num_valid


def test_a_cancelled_request_ends_within_two_steps() -> None:
    """This also holds if no caller reads its stream."""
    gate = Gate()

    async def main(worker: Worker) -> int:
        stream = await worker.submit(make_transcripts(0, LONG))
        for _ in range(3):
            await gate.wait()
            gate.passes.release()
        await gate.wait()
        stream.cancel()
        gate.open()
        (completion,) = await stream.read_completions()
        assert completion.finish_reason == "abort"
        return len(completion.token_ids)

    with running(table(gate.drafter)) as worker:
        assert asyncio.run(main(worker)) <= 3 + 2


@pytest.mark.parametrize("has_begun", [False, True])
def test_leaving_completions_cancels_the_rest(has_begun: bool) -> None:
    """This also holds if the task has not begun to read."""
    gate, notes = Gate(), Notes()

    async def main(worker: Worker) -> None:
        stream = await worker.submit(make_transcripts(0, LONG))
        await gate.wait()
        task = asyncio.ensure_future(stream.read_completions())
        if has_begun:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()
        assert await worker.drain(60)

    with running(table(gate.drafter), observer=notes) as worker:
        asyncio.run(main(worker))
    assert [t.finish_reason for t in notes.finished_] == ["abort"]


def test_a_slow_reader_is_waited_for_and_loses_nothing() -> None:
    """Its request pauses if the reader is too far behind; another one continues to its end."""
    limits = WorkerLimits(max_buffered=20_000)

    async def main(worker: Worker) -> None:
        slow = await worker.submit(make_transcripts(0, LONG))
        other = await worker.submit(make_transcripts(1, LONG))
        assert len((await other.read_completions())[0].token_ids) == 400
        while not slow.is_paused:
            await asyncio.sleep(0)
        assert slow.transcripts[0].finish_reason is None
        assert slow.backlog < limits.max_buffered + 10_000
        deltas = [delta async for delta in slow]
        assert whole(deltas).token_ids == plain_texts(LONG)[0]
        assert slow.backlog == 0
        assert slow.bytes_sent == sum(map(estimate_bytes, deltas))

    with running(table(), limits) as worker:
        asyncio.run(main(worker))


def test_a_reader_that_never_comes_back_is_left() -> None:
    clock = Clock()
    limits = WorkerLimits(max_buffered=20_000, stall_after=30.0)

    async def main(worker: Worker) -> None:
        stream = await worker.submit(make_transcripts(0, LONG))
        while not stream.is_paused:
            await asyncio.sleep(0)
        clock.now += 29
        other = await (await worker.submit(make_transcripts(1))).read_completions()
        assert other[0].token_ids == PLAIN[1]
        assert stream.transcripts[0].finish_reason is None
        while not worker.is_healthy:  # as soon as it waits for the reader, and for nothing else
            await asyncio.sleep(0)
        clock.now += 2
        await (await worker.submit(make_transcripts(2))).read_completions()
        (completion,) = await stream.read_completions()
        assert completion.finish_reason == "abort"
        assert "30 s" in str(completion.error)
        assert stream.bytes_sent < limits.max_buffered + 10_000

    with running(table(), limits, clock=clock) as worker:
        asyncio.run(main(worker))


def test_a_deadline_ends_what_runs_and_what_waits() -> None:
    """It ends at the first step after its deadline; the others continue."""
    clock, gate = Clock(), Gate()

    async def main(worker: Worker) -> None:
        first = await worker.submit(make_transcripts(0), deadline=clock.now + 5)
        waiting = await worker.submit(make_transcripts(1), deadline=clock.now + 5)
        patient = await worker.submit(make_transcripts(2), deadline=clock.now + 50)
        free = await worker.submit(make_transcripts(3))
        await gate.wait()
        clock.now += 4.9
        gate.passes.release()
        await gate.wait()
        assert first.transcripts[0].finish_reason is None
        clock.now += 0.1
        gate.open()
        (a,), (b,), (c,), (d,) = [await s.read_completions() for s in (first, waiting, patient, free)]
        assert (a.finish_reason, b.finish_reason) == ("abort", "abort")
        assert (a.token_ids, b.token_ids) == (PLAIN[0][:2], [])
        assert "deadline" in str(a.error)
        assert "waiting" in str(b.error)
        assert (c.token_ids, d.token_ids) == (PLAIN[2], PLAIN[3])

    with running(table(gate.drafter, max_batch=1), clock=clock) as worker:
        asyncio.run(main(worker))


def test_who_does_not_begin_in_time_ends() -> None:
    clock, gate = Clock(), Gate()

    async def main(worker: Worker) -> None:
        first = await worker.submit(make_transcripts(0))
        await gate.wait()
        second = await worker.submit(make_transcripts(1))
        clock.now += 1
        gate.passes.release()
        await gate.wait()
        clock.now += 3
        gate.open()
        (b,) = await second.read_completions()
        assert (b.finish_reason, b.token_ids) == ("abort", [])
        assert "3 s" in str(b.error)
        assert (await first.read_completions())[0].token_ids == PLAIN[0]

    with running(table(gate.drafter, max_batch=1), WorkerLimits(queue_timeout=3.0), clock=clock) as worker:
        asyncio.run(main(worker))


def test_a_full_queue_says_when_to_come_back() -> None:
    gate = Gate()

    async def main(worker: Worker) -> None:
        streams = [await worker.submit(make_transcripts(0))]
        await gate.wait()
        streams += [await worker.submit(make_transcripts(n)) for n in range(1, 5)]
        assert worker.num_waiting == 4
        assert not worker.is_accepting
        with pytest.raises(QueueFullError, match="try again in") as refused:
            await worker.submit(make_transcripts(5))
        assert 1 <= refused.value.retry_after <= 60
        with pytest.raises(ForedraftError, match="send fewer"):
            await worker.submit([engine_fakes.make_transcript([1], GREEDY, n) for n in range(5)])
        gate.open()
        for n, stream in enumerate(streams):
            assert (await stream.read_completions())[0].token_ids == PLAIN[n]
        assert worker.is_accepting
        assert (await (await worker.submit(make_transcripts(5))).read_completions())[0].token_ids == PLAIN[5]

    with running(table(gate.drafter, max_batch=1), WorkerLimits(max_queue=4)) as worker:
        asyncio.run(main(worker))


def test_what_can_never_run_is_refused_at_once() -> None:
    async def main(worker: Worker) -> None:
        with pytest.raises(ForedraftError, match="raise kv_tokens or lower max_tokens"):
            await worker.submit([engine_fakes.make_transcript([1] * 5, Sampling(max_tokens=16))])

    with running(FakeLLM(engine_fakes.make_engine(LM, None, num_pages=6))) as worker:
        asyncio.run(main(worker))


def test_draining_ends_nothing_and_takes_nothing() -> None:
    gate = Gate()

    async def main(worker: Worker) -> None:
        streams = [await worker.submit(make_transcripts(n)) for n in range(3)]
        await gate.wait()
        assert not await worker.drain(0.0)
        assert not worker.is_accepting
        with pytest.raises(DrainingError):
            await worker.submit(make_transcripts(3))
        gate.open()
        assert await worker.drain(60)
        assert await worker.drain(0.0)
        for n, stream in enumerate(streams):
            assert (await stream.read_completions())[0].token_ids == PLAIN[n]

    with running(table(gate.drafter)) as worker:
        asyncio.run(main(worker))


def test_abort_all_ends_everything_and_the_worker_goes_on() -> None:
    gate = Gate()

    async def main(worker: Worker) -> None:
        streams = [await worker.submit(make_transcripts(n, LONG)) for n in range(4)]
        await gate.wait()
        worker.abort_all()
        gate.open()
        for stream in streams:
            assert (await stream.read_completions())[0].finish_reason == "abort"
        assert (await (await worker.submit(make_transcripts(5))).read_completions())[0].token_ids == PLAIN[5]

    with running(table(gate.drafter, max_batch=2)) as worker:
        asyncio.run(main(worker))


def test_stopping_aborts_what_runs_and_what_is_still_on_its_way() -> None:
    gate = Gate()

    async def main(worker: Worker) -> None:
        stream = await worker.submit(make_transcripts(0, LONG))
        await gate.wait()
        stopping = asyncio.ensure_future(asyncio.to_thread(worker.stop))
        late = await worker.submit(make_transcripts(1, LONG))
        gate.open()
        await stopping
        assert (await stream.read_completions())[0].finish_reason == "abort"
        try:
            assert (await late.read_completions())[0].finish_reason == "abort"
        except ForedraftError as error:  # its command came after the order to stop
            assert "stopped" in str(error)  # noqa: PT017
        with pytest.raises(ForedraftError, match="not running"):
            await worker.submit(make_transcripts(2))
        assert not worker.is_healthy
        worker.stop()

    with running(table(gate.drafter)) as worker:
        asyncio.run(main(worker))


def test_a_loop_that_is_gone_takes_its_requests_along() -> None:
    """The state after a crash of the caller: no cancel and no read follows."""
    gate, notes = Gate(), Notes()

    async def leave(worker: Worker) -> None:
        await worker.submit(make_transcripts(0, LONG))
        await gate.wait()

    async def drain(worker: Worker) -> bool:
        return await worker.drain(60)

    with running(table(gate.drafter), observer=notes) as worker:
        asyncio.run(leave(worker))
        gate.open()
        assert asyncio.run(drain(worker))
    (transcript,) = notes.finished_
    assert transcript.finish_reason == "abort"
    assert transcript.num_tokens < 10


def test_a_hang_shows_and_so_does_its_end() -> None:
    """The heartbeat stands still while a drafter does not return; idle, it is always fresh."""
    clock, gate = Clock(), Gate()

    async def main(worker: Worker) -> None:
        clock.now += 1000
        assert worker.is_healthy
        assert worker.heartbeat == clock.now
        stream = await worker.submit(make_transcripts(0))
        await gate.wait()
        clock.now += 9
        assert worker.is_healthy
        clock.now += 2
        assert not worker.is_healthy
        assert worker.heartbeat == clock.now - 11
        gate.open()
        assert (await stream.read_completions())[0].token_ids == PLAIN[0]
        assert await worker.drain(60)
        assert worker.is_healthy

    worker = Worker(table(gate.drafter), WorkerLimits(hang_after=10.0), clock=clock)  # type: ignore[arg-type]
    assert not worker.is_healthy
    worker.start()
    asyncio.run(main(worker))
    worker.stop()
    assert not worker.is_healthy


def test_a_scheduler_that_runs_no_request_is_a_hang_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is alive and does nothing: elsewhere such a server calls itself well."""
    clock, llm, looked = Clock(), table(), threading.Semaphore(0)

    def schedule_none(*_: object) -> Batch:
        looked.release()
        return Batch((), (), ())

    async def main(worker: Worker) -> None:
        stream = await worker.submit(make_transcripts(0))
        await asyncio.to_thread(looked.acquire)
        clock.now += 11
        await asyncio.to_thread(looked.acquire)
        assert not worker.is_healthy
        monkeypatch.undo()
        assert (await stream.read_completions())[0].token_ids == PLAIN[0]
        assert worker.is_healthy

    monkeypatch.setattr(llm.engine.scheduler, "schedule", schedule_none)
    with running(llm, clock=clock) as worker:
        asyncio.run(main(worker))


def test_stopping_a_worker_that_hangs_leaves_it_behind() -> None:
    """Its streams raise rather than wait for ever."""
    gate = Gate()

    async def main(worker: Worker) -> None:
        stream = await worker.submit(make_transcripts(0))
        await gate.wait()
        worker.stop()
        with pytest.raises(ForedraftError, match="stopped"):
            await stream.read_completions()

    with running(table(gate.drafter), WorkerLimits(hang_after=0.0)) as worker:
        asyncio.run(main(worker))
        gate.open()
        worker._thread.join()


def test_an_observer_that_raises_is_ignored() -> None:
    class Rude:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("no comment")

    async def main(worker: Worker) -> None:
        streams = [await worker.submit(make_transcripts(n)) for n in range(4)]
        for n, stream in enumerate(streams):
            assert (await stream.read_completions())[0].token_ids == PLAIN[n]

    with running(table(), observer=Rude()) as worker:  # type: ignore[arg-type]
        asyncio.run(main(worker))


def test_the_loop_is_woken_once_per_step() -> None:
    """The bound holds for any number of requests: every wake-up costs the engine the interpreter's lock."""
    notes = Notes()

    async def main(worker: Worker) -> None:
        loop, calls = asyncio.get_running_loop(), 0
        call = loop.call_soon_threadsafe

        def count_calls(*args: object, **more: object) -> object:
            nonlocal calls
            calls += threading.current_thread() is worker._thread
            return call(*args, **more)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = count_calls  # type: ignore[method-assign,assignment]
        streams = [await worker.submit(make_transcripts(n)) for n in range(8)]
        await asyncio.gather(*(stream.read_completions() for stream in streams))
        assert 12 <= calls <= notes.num_steps < 8 * 12

    with running(table(), observer=notes) as worker:
        asyncio.run(main(worker))


def test_the_thread_computes_with_as_many_threads_as_its_maker() -> None:
    seen: list[int] = []

    def propose(batch: Batch) -> TokenTree:
        seen.append(torch.get_num_threads())
        return engine_fakes.draft_greedily(LM, batch)

    async def main(worker: Worker) -> None:
        await (await worker.submit(make_transcripts(0))).read_completions()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with running(table(ScriptedDrafter(propose))) as worker:
            asyncio.run(main(worker))
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {3}


def test_an_empty_submission_ends_at_once() -> None:
    async def main(worker: Worker) -> None:
        stream: Stream = await worker.submit([])
        assert await stream.read_completions() == []

    with running(table()) as worker:
        asyncio.run(main(worker))
