"""A whole run on a tiny target: what is measured, what is found, and what the engine does meanwhile."""

import json
import logging
from dataclasses import replace

import pytest

from foredraft import LLM, Sampling
from foredraft.doctor.candidate import Candidate, list_candidates
from foredraft.doctor.examination import Examination
from foredraft.doctor.measured_llm import MeasuredLLM
from foredraft.doctor.measuring_policy import MeasuringPolicy, list_lengths
from foredraft.doctor.run import DoctorPlan, run
from foredraft.doctor.step_runs import StreamRuns, has_chunk, run_waves
from foredraft.draft_length.policy import DraftCandidate
from foredraft.errors import ForedraftError
from tests.support import tiny_models

SAMPLING = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
PLAN = DoctorPlan((), ("the end and the", "for word in", "the there then"), SAMPLING, 0.5, (1, 2))
NGRAM = Candidate("ngram", "ngram", {"method": "ngram"})


@pytest.fixture
def llm() -> LLM:
    tokenizer = tiny_models.tokenizer()
    return LLM(tiny_models.llama(len(tokenizer)), None, tokenizer=tokenizer)


def test_a_run_measures_every_candidate_with_every_number_of_streams(llm):
    found = run(replace(PLAN, is_checked=True), llm, lambda title: None)
    assert [drafter.candidate.label for drafter in found.drafters] == ["ngram", "suffix"]  # those without a model
    for drafter in found.drafters:
        assert drafter.result.acceptance.num_steps > 0
        assert [one.num_streams for one in drafter.result.predictions] == [1, 2]
        assert all(one.speed_up > 0 for one in drafter.result.predictions)
        assert [check.num_streams for check in drafter.checks] == [1, 2]
    assert found.output_tokens == 24
    assert found.target.largest_batch == found.target.kv_tokens // tiny_models.CONTEXT
    json.dumps(found.json)  # nothing that JSON cannot hold


def test_a_drafter_that_does_not_fit_is_reported_and_the_others_are_measured(llm):
    strange = Candidate("medusa", "medusa", {"method": "medusa"})
    found = run(replace(PLAN, candidates=(NGRAM, strange)), llm, lambda title: None)
    assert list(found.unfit) == ["medusa"]
    assert [drafter.candidate.label for drafter in found.drafters] == ["ngram"]
    assert found.has_unfit_drafter


def test_prompts_that_do_not_fit_are_refused(llm):
    with pytest.raises(ForedraftError, match="no prompt fits"):
        run(replace(PLAN, sampling=replace(SAMPLING, max_tokens=255)), llm, lambda title: None)


def test_a_stranger_is_found_and_the_engine_says_nothing_itself(caplog):
    """The page names the drafter; the engine's own warning beside it would be the same twice."""
    target = LLM(tiny_models.llama(2003), None, tokenizer=tiny_models.tokenizer())
    spec = {"method": "draft_model", "model": tiny_models.llama(2003, seed=9)}
    plan = replace(PLAN, candidates=(Candidate("stranger", "draft_model", spec),), streams=(1, 4))
    with caplog.at_level(logging.WARNING):
        (drafter,) = run(plan, target, lambda title: None).drafters
    assert drafter.result.is_near_chance
    assert not [message for message in caplog.messages if "almost never accepted" in message]


def test_a_measuring_policy_grants_its_lengths_in_turn_and_fixed_ones_as_they_are():
    policy = MeasuringPolicy()
    policy.set_lengths((3, 1))
    free, fixed = DraftCandidate(0, 2), DraftCandidate(1, 5, min_nodes=5)
    assert [policy.allocate([free, fixed], 2) for _ in range(3)] == [[2, 5], [1, 5], [2, 5]]


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [(8, (1, 2, 3, 5, 8)), (31, (1, 2, 3, 5, 8, 16, 31)), (4, (1, 2, 3, 4)), (2, (1, 2)), (1, (1,))],
)
def test_short_and_long_drafts_are_compared_and_none_that_is_too_long(longest, lengths):
    assert list_lengths(longest) == lengths


def test_the_drafts_of_a_single_request_have_one_length(llm):
    """Fault: a long draft after short ones is accepted more often than one after long ones."""
    drafting = {"ngram": MeasuredLLM.make_drafting(llm, NGRAM.spec)}
    prompts = [[5] * 20, [6] * 20]
    examination = Examination(MeasuredLLM.make_plain(llm), drafting, prompts, SAMPLING, (1, 2), 0.5, lambda title: None)
    examination.measure()
    for wave in examination.runs["ngram", 1].waves:
        granted = {outcome.granted_nodes for report in wave.decode_reports for outcome in report.outcomes}
        assert len(granted - {0}) <= 1 or max(granted) == wave.lengths[0]  # the end of an output cuts its drafts
    lengths = [wave.lengths for wave in examination.runs["ngram", 1].waves]
    assert {(1,), (2,), (3,), (5,), (8,)} <= set(lengths)
    assert set(lengths[-1]) <= set(examination.choices["ngram"])


def test_a_wave_separates_reading_the_prompts_from_decoding(llm):
    measured, runs = MeasuredLLM.make_drafting(llm, NGRAM.spec), StreamRuns()
    prompts = [[5] * 40, [6] * 30]
    run_waves(measured.llm, measured.policy, runs, prompts, 2, SAMPLING, 0.2)
    assert len(runs.waves) > 1
    for wave in runs.waves[:-1]:
        assert wave.is_complete
        assert wave.num_start_steps >= 1
        assert wave.start_seconds > 0
        assert not any(map(has_chunk, wave.decode_reports))
    assert all(report.num_requests == 2 for report in runs.decode_reports)


def test_single_requests_read_their_whole_prompt_every_time(llm):
    """Fault: the prefix cache served a prompt of an earlier wave, and the time until the first token was too short."""
    measured, runs = MeasuredLLM.make_plain(llm), StreamRuns()
    run_waves(measured.llm, measured.policy, runs, [[5] * 64], 1, SAMPLING, 0.3)
    assert len(runs.waves) > 2
    assert {wave.reports[0].num_pass_tokens for wave in runs.waves} == {64}
    cached = StreamRuns()
    for _ in range(2):
        run_waves(measured.llm, measured.policy, cached, [[5] * 64], 1, SAMPLING, 0.0, is_cached=True)
    assert cached.waves[-1].reports[0].num_pass_tokens < 64


def test_candidates_of_a_model_without_built_in_drafters_need_no_model(llm):
    assert [candidate.method for candidate in list_candidates(llm)] == ["ngram", "suffix"]
