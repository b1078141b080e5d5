"""Memory of requests that leave: the drafter and the present draft-length policy forget their slots."""

from collections.abc import Sequence

import pytest
import torch

from foredraft import ForedraftError, Sampling
from foredraft.draft_length.policy import FixedLengthPolicy
from foredraft.engine.engine import Engine
from foredraft.engine.transcript import Transcript
from foredraft.request import RequestStatus
from tests.support import engine_fakes
from tests.support.engine_fakes import ScriptedDrafter, TableLM

LM = TableLM.from_seed(61, seed=3)
PAGE = 4  # tokens per page of `make_engine`


class ForgettingPolicy(FixedLengthPolicy):
    """Policy that notes the slots that it forgets."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def forget(self, slots: Sequence[int]) -> None:
        self.forgotten += slots


def make_engine(forgotten: list[int], max_batch: int = 4, num_pages: int = 4000) -> Engine:
    """Return an engine whose drafter notes the slots that it forgets."""
    drafter = ScriptedDrafter(lambda batch: engine_fakes.draft_greedily(LM, batch), on_forget=forgotten.extend)
    return engine_fakes.make_engine(LM, drafter, num_pages, max_batch=max_batch)


def start(engine: Engine, count: int, num_prompt: int = 3) -> list[Transcript]:
    """Add requests and run one step."""
    sampling = Sampling(max_tokens=30, temperature=0)
    transcripts = [engine_fakes.make_transcript([n + 1] * num_prompt, sampling, n) for n in range(count)]
    for transcript in transcripts:
        engine.add(transcript)
    engine.step()
    return transcripts


def test_drafter_and_the_policy_that_replaced_another_forget_the_slots_of_removed_requests() -> None:
    forgotten: list[int] = []
    engine, first, second = make_engine(forgotten), ForgettingPolicy(), ForgettingPolicy()
    engine.length_policy = first
    engine.length_policy = second  # as after a calibration
    transcripts = start(engine, 3)
    gone = [transcripts[0].request, transcripts[2].request]
    slots = [request.slot for request in gone]
    engine.memory.remove(gone)
    assert forgotten == second.forgotten == slots
    assert first.forgotten == []
    assert [request.status for request in gone] == [RequestStatus.FINISHED] * 2
    assert list(engine.scheduler.running) == [transcripts[1].request]


def test_removing_a_request_that_waits_forgets_no_slot() -> None:
    forgotten: list[int] = []
    engine = make_engine(forgotten, max_batch=1)
    _, waiting = start(engine, 2)
    engine.memory.remove([waiting.request])
    assert forgotten == []
    assert waiting.request.status is RequestStatus.FINISHED


def test_the_last_request_is_preempted_as_soon_as_the_pages_run_out() -> None:
    forgotten: list[int] = []
    engine = make_engine(forgotten, num_pages=12)
    policy = engine.length_policy = ForgettingPolicy()
    first, last = start(engine, 2, num_prompt=12)
    slot = last.request.slot
    while last.request.status is RequestStatus.RUNNING:
        engine.memory.apply_releases(None, frozenset())
        if last.request.status is RequestStatus.RUNNING:
            assert forgotten == []
            engine.step()
    assert last.request.status is RequestStatus.PREEMPTED
    assert forgotten == policy.forgotten == [slot]
    assert first.request.status is RequestStatus.RUNNING


def test_clearing_drops_the_kv_and_forgets_every_slot() -> None:
    drafter = engine_fakes.make_drafter(LM.perturb(0.3), 3)
    engine = engine_fakes.make_engine(LM, drafter, max_batch=4)
    policy = engine.length_policy = ForgettingPolicy()
    start(engine, 2)
    assert drafter.num_valid
    pools, row = (LM.pool, drafter.draft_kv.pool), torch.ones(1, 1, 1)
    for pool in pools:
        pool.write(0, torch.tensor([PAGE]), row, row, 2 * PAGE)
    engine.memory.clear()
    assert not drafter.num_valid
    assert not any(pool.layers for pool in pools)
    assert policy.forgotten == [0, 1, 2, 3]


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(20, 24), (1, 43), (43, 1)])
def test_a_request_fits_if_all_pages_but_the_null_page_hold_it(num_prompt: int, max_tokens: int) -> None:
    engine = make_engine([], num_pages=12)
    length = num_prompt + max_tokens
    assert length == (12 - 1) * PAGE
    fitting = engine_fakes.make_transcript([1] * num_prompt, Sampling(max_tokens=max_tokens))
    engine.memory.check_fits(fitting.request)
    longer = engine_fakes.make_transcript([1] * num_prompt, Sampling(max_tokens=max_tokens + 1))
    with pytest.raises(ForedraftError, match=f"need {length + 1} tokens of KV memory and the pool holds {length};"):
        engine.memory.check_fits(longer.request)
    limited = engine_fakes.make_transcript([1] * num_prompt, Sampling(max_tokens=max_tokens + 1), max_length=length)
    engine.memory.check_fits(limited.request)


class RestingPolicy(FixedLengthPolicy):
    """Policy whose drafting rests if the test sets it."""

    def __init__(self) -> None:
        self.rests = False

    @property
    def is_resting(self) -> bool:
        return self.rests


@pytest.mark.parametrize("rests", [False, True])
def test_pending_draft_kv_is_written_unless_drafting_rests(rests: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, policy, flushed = make_engine([]), RestingPolicy(), list[int]()
    engine.length_policy, policy.rests = policy, rests
    monkeypatch.setattr(engine.memory.drafter, "flush", flushed.extend)
    transcripts = start(engine, 2, num_prompt=2 * PAGE)
    slots = [transcript.request.slot for transcript in transcripts]
    engine.memory.remove([transcript.request for transcript in transcripts])
    assert flushed == ([] if rests else slots)
