"""Warnings: each for its own fault, with a remedy, and none for a drafter that pays."""

from dataclasses import replace

import pytest

from foredraft.doctor.acceptance import MeasuredAcceptance
from foredraft.doctor.candidate import Candidate
from foredraft.doctor.diagnosis import Diagnosis, DrafterDiagnosis
from foredraft.doctor.examination import DrafterResult
from foredraft.doctor.facts import DrafterFacts, MachineFacts, TargetFacts
from foredraft.doctor.findings import check_drafter, check_target
from foredraft.doctor.prediction import StreamPrediction

FACTS = DrafterFacts("head", "medusa", "org/head", 1000, "BF16", 2000, 0, "same", True, 4, True)
MACHINE = MachineFacts("a processor", {}, "avx512", 10.0, 8 << 30)
TARGET = TargetFacts("model", "Llama", 10**9, "bfloat16", None, 4096, 32000, True, True, None, 2e9, 1000, 10**6, 2048)


def make_result(*speed_ups: float, free: float = 1.5, drafts: int = 200, first: int = 100) -> DrafterResult:
    predictions = tuple(
        StreamPrediction(1 << i, 3, 2.0, 100.0, 100.0 * one, {3: one}, free) for i, one in enumerate(speed_ups)
    )
    acceptance = MeasuredAcceptance((0.5,), (1.0,), drafts, first, drafts)
    return DrafterResult(acceptance, {}, predictions, 0.0, acceptance.is_near_chance)


def list_codes(facts: DrafterFacts, result: DrafterResult, is_cpu: bool = True) -> list[str]:
    return [finding.code for finding in check_drafter(facts, result, is_cpu)]


def test_a_drafter_that_pays_has_no_warning():
    assert list_codes(FACTS, make_result(1.4, 0.9)) == []


@pytest.mark.parametrize(
    ("facts", "result", "code"),
    [
        (FACTS, make_result(0.8, first=0), "mismatch"),
        (FACTS, make_result(0.9, 0.8), "large draft"),
        (FACTS, make_result(0.9, free=1.0), "costly rows"),
        (FACTS, make_result(1.005, free=1.005), "costly rows"),
        (replace(FACTS, vocabulary="slem"), make_result(1.4), "vocabulary"),
        (replace(FACTS, is_native=False), make_result(1.4), "not native"),
        (FACTS, make_result(1.4, drafts=10, first=5), "few drafts"),
    ],
)
def test_every_fault_of_a_drafter_has_its_warning(facts, result, code):
    (found,) = check_drafter(facts, result, is_cpu=True)
    assert (found.code, found.drafter) == (code, "head")
    assert found.remedy


def test_a_method_without_weights_is_no_mismatch():
    assert "mismatch" not in list_codes(replace(FACTS, model=None), make_result(0.8, first=0))


def test_torch_modules_are_right_on_a_gpu():
    assert list_codes(replace(FACTS, is_native=False), make_result(1.4), is_cpu=False) == []
    assert check_target(replace(TARGET, is_native=False, reason="a GPU"), MACHINE, is_cpu=False) == []


@pytest.mark.parametrize(
    ("target", "machine", "code"),
    [
        (replace(TARGET, is_native=False, reason="models of type gpt2"), MACHINE, "not native"),
        (replace(TARGET, kv_tokens=2048), MACHINE, "memory"),
        (TARGET, replace(MACHINE, free_bytes=1 << 20), "memory"),
    ],
)
def test_every_fault_of_a_target_has_its_warning(target, machine, code):
    assert [finding.code for finding in check_target(target, machine, is_cpu=True)] == [code]
    assert not check_target(TARGET, MACHINE, is_cpu=True)


def make_diagnosis(*results: DrafterResult, are_given: bool = True, unfit: dict[str, str] | None = None) -> Diagnosis:
    drafters = tuple(
        DrafterDiagnosis(Candidate(f"d{i}", "ngram", {"method": "ngram"}), FACTS, one) for i, one in enumerate(results)
    )
    return Diagnosis(MACHINE, TARGET, drafters, unfit or {}, [(1, 0.01)], {1: 0.012}, (), are_given, 100.0)


def test_the_verdict_is_the_drafter_with_the_highest_mean_speed_up():
    verdict = make_diagnosis(make_result(1.5, 0.7), make_result(1.4, 1.3)).verdict
    assert verdict.drafter is not None
    assert verdict.drafter.candidate.label == "d1"
    assert verdict.lengths == {1: 3, 2: 3}
    assert verdict.spec_tokens == "3"


def test_the_length_is_left_to_the_engine_where_it_differs_by_streams():
    assert make_diagnosis(make_result(1.5, 0.7)).verdict.spec_tokens == "auto"


def test_nothing_that_pays_is_plain_decoding():
    assert make_diagnosis(make_result(0.9), make_result(1.0)).verdict.drafter is None


@pytest.mark.parametrize(
    ("diagnosis", "is_unfit"),
    [
        (make_diagnosis(make_result(1.4)), False),
        (make_diagnosis(make_result(0.9)), True),
        (make_diagnosis(make_result(1.4), make_result(0.9)), True),
        (make_diagnosis(make_result(0.9), are_given=False), False),
        (make_diagnosis(unfit={"head": "of another width"}), True),
    ],
)
def test_only_a_given_drafter_is_unfit(diagnosis, is_unfit):
    assert diagnosis.has_unfit_drafter == is_unfit


def test_the_work_beside_the_pass_is_the_rest_of_a_plain_step():
    assert make_diagnosis().host_seconds == pytest.approx(0.002)
