"""A failed step is undone, and costs no other request a token.

Guards against one request's fault ending all (the whole engine dies elsewhere), text emitted twice or lost because a
step failed halfway, and an engine that restarts for ever over a device that is gone.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft import Completion, Sampling
from foredraft.engine import engine as engine_module
from foredraft.engine import step_output
from foredraft.engine.delta_queue import DeltaQueue
from foredraft.engine.engine import Engine
from foredraft.engine.fault_isolation import MAX_RESETS
from foredraft.engine.sandbox import MAX_FAILURES
from foredraft.engine.stats_recorder import StatsRecorder
from foredraft.engine.transcript import Transcript
from foredraft.engine.worker import Worker, WorkerLimits
from foredraft.errors import TargetLostError
from foredraft.llm import LLM
from foredraft.models.forward_batch import ForwardBatch
from foredraft.request import Batch
from foredraft.tree import TokenTree
from tests.engine.test_worker import FakeLLM, Notes, assert_idle, running, whole
from tests.support import engine_fakes, tiny_models
from tests.support.engine_fakes import ScriptedDrafter, TableLM

V = 61
LM = TableLM.from_seed(V, seed=3)
SAMPLINGS = [
    Sampling(max_tokens=40, temperature=0, ignore_eos=True),
    Sampling(max_tokens=32, ignore_eos=True, seed=5, temperature=0.9, top_p=0.9, stop=("e",)),
    Sampling(
        max_tokens=36, ignore_eos=True, seed=6, temperature=0.8, frequency_penalty=0.4, logprobs=2, prompt_logprobs=1
    ),
    Sampling(max_tokens=28, ignore_eos=True, seed=7, n=2, presence_penalty=0.5, logprobs=1),
]
PROMPTS = [[5, 6, 7], [40, 41, 42, 43, 44, 45], list(range(10, 40)), [90]]


@dataclass
class FaultyLM:
    """A model that fails on command."""

    inner: Any
    fails: Callable[[ForwardBatch], Exception | None]
    num_faults: int = 0

    def forward(self, window: ForwardBatch, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        error = self.fails(window)
        if error is not None:
            self.num_faults += 1
            raise error
        return self.inner.forward(window, taps)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class Plan:
    """Fails at the given calls, counted from one."""

    at: set[int]
    error: Callable[[], Exception] = lambda: RuntimeError("CUDA error: an illegal address in /usr/lib/secret.so")
    num_calls: int = 0
    num_faults: int = field(default=0)

    def __call__(self, *_: object) -> Exception | None:
        self.num_calls += 1
        if self.num_calls in self.at:
            self.num_faults += 1
            return self.error()
        return None


@pytest.fixture(scope="module")
def made() -> LLM:
    """The real thing: attention and pages, and text, so that characters and stop strings count too."""
    target = tiny_models.llama(vocab_size=320, seed=2)
    return LLM(target, None, tokenizer=tiny_models.tokenizer(), is_debug=True)


def with_draft(made: LLM) -> LLM:
    draft = tiny_models.perturb(made.target.model, 0.04)
    return made.with_drafter(tiny_models.draft_model(3, model=draft))


async def ask_all(worker: Worker, llm: LLM) -> list[Completion]:
    async def one(n: int) -> list[Completion]:
        transcripts = llm.prepare(PROMPTS[n], SAMPLINGS[n])
        deltas = [delta async for delta in await worker.submit(transcripts)]
        return [whole([d for d in deltas if d.index == t.index]) for t in transcripts]

    return [c for completions in await asyncio.gather(*map(one, range(len(PROMPTS)))) for c in completions]


def generate_expected(made: LLM) -> list[Completion]:
    return [c for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True) for c in made.generate(prompt, sampling)]


def assert_same(found: list[Completion], plain: list[Completion]) -> None:
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert (ours.text, ours.finish_reason, ours.stop_reason) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        assert _flat(ours.logprobs) == pytest.approx(_flat(theirs.logprobs))
        assert _flat(ours.prompt_logprobs) == pytest.approx(_flat(theirs.prompt_logprobs))
        stats = ours.stats
        assert stats.num_tokens == len(ours.token_ids)
        assert stats.num_accepted == sum(stats.accepted_at)
        # every pass gave its accepted tokens and one more; the last may have been cut at an accepted one
        assert stats.num_tokens - 1 <= stats.num_accepted + stats.target_passes <= stats.num_tokens + 1


def _flat(entries: Any) -> list[float]:
    return [entry.logprob for entry in entries or [] if entry is not None]


def _patch(owner: object, name: str, plan: Plan, is_after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(owner, name)

    def maybe(*args: Any, **more: Any) -> Any:
        error = plan(*args)
        if error is not None and not is_after:
            raise error
        result = real(*args, **more)
        if error is not None:
            raise error
        return result

    monkeypatch.setattr(owner, name, maybe)


STAGES: dict[str, Callable[[Engine], tuple[object, str]]] = {
    "schedule": lambda engine: (engine.scheduler, "schedule"),
    "guard": lambda engine: (engine.drafter, "propose"),
    "forward": lambda engine: (engine.target, "forward"),
    "score": lambda engine: (engine_module, "collect_output"),
    "rule": lambda engine: (engine_module, "verify_step"),
    "cut": lambda engine: (engine, "_append_tokens"),
    "push": lambda engine: (Transcript, "push"),
    "count": lambda engine: (StatsRecorder, "record_step"),
    "keep": lambda engine: (engine_module, "compact_kv"),
    "observe": lambda engine: (engine.drafter, "observe"),
    "commit": lambda engine: (engine.scheduler, "commit"),
    "release": lambda engine: (engine.scheduler, "finish"),
    "origins": lambda engine: (step_output, "classify_origins"),
    "emit": lambda engine: (Transcript, "emit"),
    "put": lambda engine: (DeltaQueue, "put"),
    "keep_counts": lambda engine: (StatsRecorder, "keep_step"),
    "mark": lambda engine: (DeltaQueue, "mark_emitted"),
    "completion": lambda engine: (Transcript, "build_completion"),
    "publish": lambda engine: (engine, "_emit_deltas"),
    "report": lambda engine: (engine, "_finish_step"),
    "learn": lambda engine: (engine.length_policy, "record_step"),
}


DELTA_STAGES = ("push", "emit", "origins", "count", "put", "keep_counts", "mark")
AT = {stage: {2, 60} for stage in DELTA_STAGES} | {"release": {2}, "completion": {2}}


@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_at_any_stage_of_a_step_changes_no_text(
    stage: str, is_after: bool, made: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, far apart, before and after what the stage does: nothing is lost, doubled, or counted twice."""
    plain, llm = generate_expected(made), with_draft(made)
    plan, notes = Plan(AT.get(stage, {2, 12})), Notes()
    _patch(*STAGES[stage](llm.engine), plan, is_after, monkeypatch)
    with running(llm, observer=notes) as worker:
        found = asyncio.run(ask_all(worker, llm))
        monkeypatch.undo()
    assert plan.num_faults == len(plan.at)
    assert notes.failures == ["step"] * len(plan.at)  # the second came after every suspect was cleared
    assert_same(found, plain)
    assert len(notes.finished_) == len(plain)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, torch.cuda.OutOfMemoryError, AssertionError])
def test_faults_of_the_target_at_random_steps_change_no_text(error: type[Exception], made: LLM) -> None:
    """Each fault lies between two good steps, in every state of the engine."""
    rng = random.Random(1)
    plain = generate_expected(made)
    for _ in range(3):
        at, call = set(), 0
        for _ in range(6):
            call += rng.randint(6, 10)
            at.add(call)
        llm, plan, notes = with_draft(made), Plan(at, lambda: error("out of memory")), Notes()
        llm.engine.target = FaultyLM(llm.engine.target, plan)
        with running(llm, observer=notes) as worker:
            found = asyncio.run(ask_all(worker, llm))
        assert plan.num_faults >= 2
        survivors = [(ours, theirs) for ours, theirs in zip(found, plain, strict=True) if ours.finish_reason != "error"]
        assert len(survivors) >= len(plain) - notes.failures.count("request")
        assert_same(*map(list, zip(*survivors, strict=True)))  # type: ignore[arg-type]
        assert notes.failures.count("step") == plan.num_faults
        assert not llm.engine.scheduler.has_work


def culprit_of(tokens: set[int]) -> Callable[[ForwardBatch], Exception | None]:
    """Fails if a pass reads one of these tokens."""

    def fails(window: ForwardBatch) -> Exception | None:
        found = tokens & {token for span in window.spans for token in span.tokens}
        return RuntimeError(f"assertion failed in /opt/kernels.cu:12, token {found}") if found else None

    return fails


SLOW = Sampling(max_tokens=25, temperature=0)
CULPRITS = [V - 1, V - 2]


def many(num: int, bad: dict[int, int]) -> tuple[list[Transcript], list[list[int]]]:
    """Requests of which `bad` hold a token that no other text does; and all texts of a sound engine."""
    table = LM.table.clone()
    table[:, CULPRITS] = -1e9  # never emitted: only prompts hold them
    sound = TableLM(table)
    prompts = [[n + 1, 2, 3, *([bad[n]] if n in bad else [])] for n in range(num)]
    made = [engine_fakes.make_transcript(prompt, SLOW, n) for n, prompt in enumerate(prompts)]
    done = engine_fakes.run(
        engine_fakes.make_engine(sound, None), [engine_fakes.make_transcript(p, SLOW, n) for n, p in enumerate(prompts)]
    )
    return made, [completion.token_ids for completion, _ in done]


def sound() -> TableLM:
    table = LM.table.clone()
    table[:, CULPRITS] = -1e9
    return TableLM(table)


@pytest.mark.parametrize("bad", [{3: CULPRITS[0]}, {0: CULPRITS[0], 1: CULPRITS[1]}, {5: CULPRITS[0], 2: CULPRITS[0]}])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_request_that_makes_a_step_fail_fails_alone(bad: dict[int, int], is_late: bool) -> None:
    """It runs in a batch, alone or with a second culprit, from the start or after the first delta of the others. Its
    error names no file of the package."""
    notes = Notes()
    transcripts, plain = many(8, bad)

    async def main(worker: Worker) -> list[Completion]:
        first = [t for n, t in enumerate(transcripts) if n not in bad] if is_late else transcripts
        streams = [await worker.submit(first)]
        if is_late:
            await anext(streams[0])
            streams += [await worker.submit([transcripts[n] for n in bad])]
        for stream in streams:
            async for _ in stream:
                pass
        assert worker.is_healthy
        return [transcript.build_completion() for transcript in transcripts]

    engine = engine_fakes.make_engine(FaultyLM(sound(), culprit_of(set(CULPRITS))), None)  # type: ignore[arg-type]
    with running(FakeLLM(engine), observer=notes) as worker:
        done = asyncio.run(main(worker))
    for n, completion in enumerate(done):
        if n in bad:
            assert (completion.finish_reason, completion.token_ids) == ("error", [])
            assert completion.error is not None
            assert "/" not in completion.error
            assert "token" not in completion.error
        else:
            assert (completion.finish_reason, completion.token_ids) == ("length", plain[n])
    assert notes.failures.count("request") == len(bad)
    assert "engine" not in notes.failures


def test_requests_that_fail_only_together_all_end_well() -> None:
    """Memory for three of six: no request is at fault, so fewer run at once."""
    transcripts, plain = many(6, {})
    too_many = FaultyLM(sound(), lambda window: MemoryError() if len(window.spans) > 3 else None)
    engine, notes = engine_fakes.make_engine(too_many, None), Notes()  # type: ignore[arg-type]

    async def main(worker: Worker) -> list[Completion]:
        return await (await worker.submit(transcripts)).read_completions()

    with running(FakeLLM(engine), observer=notes) as worker:
        assert [c.token_ids for c in asyncio.run(main(worker))] == plain
    assert set(notes.failures) == {"step"}
    assert too_many.num_faults <= 2


def test_a_device_that_is_gone_ends_everything_and_shows() -> None:
    """Once each of five has failed alone, after all together. Should it come back, so does health."""
    is_gone = True
    engine = engine_fakes.make_engine(FaultyLM(sound(), lambda window: RuntimeError("gone") if is_gone else None), None)  # type: ignore[arg-type]
    transcripts, plain = many(5, {})
    notes = Notes()

    async def main(worker: Worker) -> None:
        nonlocal is_gone
        done = await (await worker.submit(transcripts)).read_completions()
        assert {c.finish_reason for c in done} == {"error"}
        assert all(c.error is not None and "gone" not in c.error for c in done)
        assert not worker.is_healthy
        is_gone = False
        again, _ = many(5, {})
        assert [c.token_ids for c in await (await worker.submit(again)).read_completions()] == plain
        assert worker.is_healthy

    with running(FakeLLM(engine), observer=notes) as worker:
        asyncio.run(main(worker))
    assert notes.failures.count("step") == 1 + 5
    assert notes.failures[-1] == "engine"


def test_a_lost_target_ends_every_request_at_once_with_its_reason() -> None:
    """No request is suspected and tried alone: each trial would wait for a process that is gone."""
    engine = engine_fakes.make_engine(FaultyLM(sound(), lambda window: TargetLostError("rank 1 is gone")), None)  # type: ignore[arg-type]
    transcripts, _ = many(5, {})
    notes = Notes()

    async def main(worker: Worker) -> None:
        done = await (await worker.submit(transcripts)).read_completions()
        assert {(c.finish_reason, c.error) for c in done} == {("error", "rank 1 is gone")}
        assert not worker.is_healthy

    with running(FakeLLM(engine), observer=notes) as worker:
        asyncio.run(main(worker))
    assert notes.failures == ["step", "engine"]


def test_a_device_that_is_gone_is_not_tried_by_everyone_who_waits() -> None:
    """Two run, thirty wait: those two, one of them alone, two others, and that is that."""
    engine = engine_fakes.make_engine(FaultyLM(sound(), lambda window: RuntimeError("gone")), None, max_batch=2)  # type: ignore[arg-type]
    transcripts, _ = many(32, {})
    notes = Notes()

    async def main(worker: Worker) -> None:
        done = await (await worker.submit(transcripts)).read_completions()
        assert {c.finish_reason for c in done} == {"error"}
        assert not worker.is_healthy

    with running(FakeLLM(engine), observer=notes) as worker:
        asyncio.run(main(worker))
    assert notes.failures.count("step") == MAX_RESETS


def test_a_tokenizer_that_raises_ends_its_request_alone() -> None:
    class Bad:
        eos_token_id = None

        def decode(self, ids: list[int], **_: object) -> str:
            if ids[-1] == plain[1][9]:
                raise UnicodeError("no such character")
            return " ".join(map(str, ids))

    _, plain = many(4, {})
    made = [engine_fakes.make_transcript([n + 1, 2, 3], SLOW, n, Bad() if n == 1 else None) for n in range(4)]

    async def main(worker: Worker) -> list[Completion]:
        return await (await worker.submit(made)).read_completions()

    with running(FakeLLM(engine_fakes.make_engine(sound(), None))) as worker:
        done = asyncio.run(main(worker))
    assert [c.finish_reason for c in done] == ["length", "error", "length", "length"]
    assert [c.token_ids for n, c in enumerate(done) if n != 1] == [text for n, text in enumerate(plain) if n != 1]
    assert done[1].token_ids == plain[1][: len(done[1].token_ids)]
    assert done[1].text.split() == list(map(str, done[1].token_ids))
    assert 0 < len(done[1].token_ids) <= 9


def test_random_faults_of_a_drafter_cost_no_request() -> None:
    """The drafter fails until it is suspended; each kind of fault is counted."""
    rng = random.Random(0)
    transcripts, plain = many(6, {})
    kinds = {"raised": 0, "malformed": 0}

    def propose(batch: Batch) -> Any:
        chance = rng.random()
        if chance < 0.2:
            kinds["raised"] += 1
            raise torch.cuda.OutOfMemoryError("the draft's")
        if chance < 0.4:
            kinds["malformed"] += 1
            return None if chance < 0.3 else engine_fakes.draft_greedily(sound(), batch).select([0, 0])
        return engine_fakes.draft_greedily(sound(), batch)

    engine, notes = engine_fakes.make_engine(sound(), ScriptedDrafter(propose)), Notes()

    async def main(worker: Worker) -> list[Completion]:
        return [(await (await worker.submit([t])).read_completions())[0] for t in transcripts]

    with running(FakeLLM(engine), observer=notes) as worker:
        assert [c.token_ids for c in asyncio.run(main(worker))] == plain
    assert notes.failures == []
    assert sum(kinds.values()) == engine.drafter.num_failures == MAX_FAILURES
    # a tree that is none at all raises while it is looked at, which counts as malformed
    assert engine.drafter.failures["raised"] == kinds["raised"]
    assert engine.drafter.failures["malformed"] == kinds["malformed"]


def test_a_drafter_that_is_far_too_slow_is_left_alone() -> None:
    """Its drafts are used whether in time or late: time changes no text."""
    now = 0.0

    def propose(batch: Batch) -> TokenTree:
        nonlocal now
        now += 3
        return engine_fakes.draft_greedily(sound(), batch)

    drafter = ScriptedDrafter(propose)
    engine = engine_fakes.make_engine(sound(), drafter, clock=lambda: now)
    transcripts, plain = many(1, {})

    async def main(worker: Worker) -> list[Completion]:
        return await (await worker.submit(transcripts)).read_completions()

    with running(FakeLLM(engine), WorkerLimits(drafter_timeout=2.5)) as worker:
        (done,) = asyncio.run(main(worker))
    assert done.token_ids == plain[0]
    assert engine.drafter.failures == {"slow": MAX_FAILURES}
    assert drafter.num_proposed == MAX_FAILURES
    assert done.stats.num_accepted > 0


def test_a_step_that_is_taken_back_gives_everything_back() -> None:
    """The engine by itself, without a worker: pages, slots, the drafter's state, and the emitted text."""
    drafter = engine_fakes.make_drafter(LM.perturb(0.3), 3)
    plan = Plan({3})
    engine = engine_fakes.make_engine(FaultyLM(LM, plan), drafter)  # type: ignore[arg-type]
    transcripts = [engine_fakes.make_transcript([n + 1, 2], SLOW, n) for n in range(3)]
    for transcript in transcripts:
        engine.add(transcript)
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="illegal address"):
        engine.step()
    engine.recover()
    assert engine.scheduler.allocator.num_used == 0
    assert not engine.scheduler.running
    assert not drafter.num_valid
    assert all(t.num_tokens == len(t.request.output) == t.num_emitted > 0 for t in transcripts)
    while engine.has_work:
        engine.step()
    assert_idle(engine)
    plain = engine_fakes.run(
        engine_fakes.make_engine(LM, None), [engine_fakes.make_transcript([n + 1, 2], SLOW, n) for n in range(3)]
    )
    assert [whole(list(t.deltas)).token_ids for t in transcripts] == [c.token_ids for c, _ in plain]
