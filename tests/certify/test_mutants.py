"""A certificate passes the real system and fails with every seeded fault of the test suite."""

from dataclasses import replace

import pytest
import torch

from foredraft import LLM
from foredraft.certify import certificate, rule_check, samples
from foredraft.certify.certificate import CertifyPlan, iterate_checks
from foredraft.certify.distributions import DistributionChecks
from foredraft.certify.extremes import check_extremes
from foredraft.certify.parameters import check_parameters
from foredraft.certify.result import CheckResult
from foredraft.certify.rule_check import check_rule
from foredraft.certify.subject import Subject
from foredraft.drafters.common.tree_builder import TreeOptions
from foredraft.drafters.interface import Drafter
from foredraft.sampling import rng
from foredraft.verification.registry import RULES
from foredraft.verification.rule import Rule
from tests.support import engine_mutants, mutants, spectr_mutants, tiny_models

PLAN = CertifyPlan((), max_tokens=8, num_samples=800)
SUBTLE = ("thr_0.99", "generous")  # faults that need all points of the integration
COARSE_LIMIT = 0.006  # bias of a step at few points of the integration, whose error is then below 0.0055
PROMPTS = ([5, 9, 14, 9, 5], [11, 2, 30, 8])


@pytest.fixture(autouse=True)
def _make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_GROUPS", 1)
    monkeypatch.setattr(certificate, "NUM_SAMPLED_PROMPTS", 1)


def make_subject(drafter: Drafter, verify: Rule | str = "auto") -> Subject:
    llm = LLM(tiny_models.target(), drafter, verify=verify, tokenizer=tiny_models.tokenizer())
    return replace(Subject.make(llm, ()), prompts=PROMPTS)


def run_checks(drafter: Drafter, verify: Rule | str = "auto") -> list[CheckResult]:
    """Run all checks of a certificate."""
    return list(iterate_checks(make_subject(drafter, verify), PLAN, lambda _: None))


def find_failure(drafter: Drafter, verify: Rule | str = "auto") -> str:
    """Return the name of the first failed check of a certificate, "" if all pass."""
    checks = iterate_checks(make_subject(drafter, verify), PLAN, lambda _: None)
    return next((result.name for result in checks if not result.is_passed), "")


def integrate_coarsely(monkeypatch: pytest.MonkeyPatch, num_points: int = 1 << 12) -> None:
    """Save time where a fault is large."""
    monkeypatch.setattr(rule_check, "NUM_POINTS", num_points)
    monkeypatch.setattr(rule_check, "BIAS_LIMIT", COARSE_LIMIT)


def make_chain() -> Drafter:
    return tiny_models.draft_model(2)


def make_tree() -> Drafter:
    return tiny_models.draft_model(2, branching=(3, 1))


def make_independent() -> Drafter:
    return tiny_models.draft_model(2, options=TreeOptions(num_drafts=2))


def adapt(name: str, function: object) -> Rule:
    return replace(RULES[name], verify=engine_mutants.in_engine(function))


# the real system


@pytest.mark.parametrize(
    ("make_drafter", "verify"),
    [(make_chain, "auto"), (make_tree, "reject"), (make_chain, adapt("reject", mutants.make_reject_rule()))],
    ids=["auto", "trees", "adapted"],
)
def test_the_real_system_passes(make_drafter, verify, monkeypatch):
    if verify != "auto":
        integrate_coarsely(monkeypatch)
    results = run_checks(make_drafter(), verify)
    assert [result for result in results if not result.is_passed] == []
    kinds = {result.name.partition(" (")[0] for result in results}
    assert kinds == {
        "greedy outputs", "seeded outputs", "batches and draft lengths", "log-probabilities", "sampling parameters",
        "extreme random numbers", "rule", "first 3 tokens", "target", "draft tokens", "steps", "uniforms",
    }  # fmt: skip


def test_samples_with_replacement_pass(monkeypatch):
    integrate_coarsely(monkeypatch)
    assert find_failure(make_independent(), "spectr") == ""


# rules: the certificate has the check `rule`, by the test above


@pytest.mark.parametrize(
    "rule",
    [adapt("reject", mutants.make_reject_rule()), adapt("block", mutants.make_block_rule())],
    ids=["reject", "block"],
)
def test_the_adapted_programs_without_a_fault_pass(rule):
    assert check_rule(rule).is_passed


@pytest.mark.parametrize("name", [*mutants.REJECTS, *mutants.TREES])
def test_a_fault_of_token_verification_fails(name, monkeypatch):
    if name not in SUBTLE:
        integrate_coarsely(monkeypatch)
    assert not check_rule(adapt("reject", {**mutants.REJECTS, **mutants.TREES}[name])).is_passed


@pytest.mark.parametrize("name", mutants.BLOCKS)
def test_a_fault_of_block_verification_fails(name, monkeypatch):
    integrate_coarsely(monkeypatch)
    assert not check_rule(adapt("block", mutants.BLOCKS[name])).is_passed


@pytest.mark.parametrize("name", ["", *spectr_mutants.MUTANTS])
def test_a_fault_of_independent_samples_fails(name, monkeypatch):
    """The rules written from the paper are slow, hence fewer points and a wider limit."""
    integrate_coarsely(monkeypatch, 1 << 11)
    function = spectr_mutants.MUTANTS[name] if name else spectr_mutants.make_spectr_rule()
    assert check_rule(adapt("spectr", engine_mutants.one_by_one(function))).is_passed == (name == "")


def test_a_comparison_that_is_not_strict_fails():
    assert not check_extremes(adapt("reject", mutants.NON_STRICT)).is_passed
    assert check_extremes(adapt("reject", mutants.make_reject_rule())).is_passed


def test_a_lossy_rule_fails(monkeypatch):
    integrate_coarsely(monkeypatch)
    assert find_failure(make_chain(), "typical") == "rule (typical)"


@pytest.mark.parametrize("name", ["reject", "typical"])
def test_another_rule_in_place_of_match_fails(name, monkeypatch):
    monkeypatch.setattr("foredraft.request_factory.MATCH", replace(RULES["match"], verify=RULES[name].verify))
    assert find_failure(make_chain()) == "seeded outputs"


# distributions

TARGETS = {
    "target_unfiltered": mutants.skip_draft_filters,
    "bonus_unfiltered": mutants.skip_bonus_filters,
    "filters ignored": mutants.skip_filters,
    "temp_2pct": mutants.raise_temperature,
    "bf16_probs": mutants.round_to_bfloat16,
    "constraints ignore the draft": mutants.ignore_draft,
    "penalties count the last token of a step": mutants.count_last_draft_only,
    "min_tokens counts steps": mutants.count_min_tokens_by_step,
    "nucleus before temperature": mutants.filter_before_temperature,
    "penalties of the prompt": mutants.count_prompt_presence,
    "repetition of the output alone": mutants.count_output_repetition,
    "bias after the filters": mutants.add_bias_after_filters,
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_wrong_distribution_of_the_target_fails(name, monkeypatch):
    wrong = engine_mutants.with_histories(TARGETS[name])
    monkeypatch.setattr("foredraft.verification.probs.distribution", wrong)
    assert not check_parameters(make_subject(make_chain())).is_passed


@pytest.mark.parametrize("claim", [engine_mutants.UnfilteredClaim, engine_mutants.SoftClaim])
def test_a_draft_that_is_not_sampled_from_its_q_fails(claim):
    checks = DistributionChecks.sample(make_subject(claim(make_chain()), "reject"), RULES["reject"], 800, 1)
    assert not checks.check_drafts().is_passed


# random numbers

NOISE = {
    "u_is_draft_u": ("reject", mutants.reuse_draft_uniforms),
    "uniforms keyed without position": ("reject", mutants.drop_position_from_uniforms),
    "uniforms keyed without seed": ("reject", mutants.drop_seed_from_uniforms),
    "noise keyed without position": ("auto", mutants.drop_position_from_keys),
    "noise keyed without seed": ("auto", mutants.drop_seed_from_uniforms),
    "noise keyed by step": ("auto", mutants.key_by_step),
}


@pytest.mark.parametrize("name", NOISE)
def test_wrong_random_numbers_fail(name, monkeypatch):
    integrate_coarsely(monkeypatch)
    verify, make_table = NOISE[name]
    monkeypatch.setattr("foredraft.engine.engine.SeededNoise", engine_mutants.make_mutant_noise(make_table))
    assert find_failure(make_chain(), verify)


@pytest.mark.parametrize("race", [mutants.race_linearly, mutants.race_with_one_number])
def test_a_race_that_is_not_exponential_fails(race, monkeypatch):
    def race_argmax(p, key: int) -> int:
        return int(race(torch.from_numpy(p)[None], torch.tensor([key])).argmax())

    integrate_coarsely(monkeypatch)
    monkeypatch.setattr(rng, "exponential_race", race)
    monkeypatch.setattr(rng, "race_argmax", race_argmax)
    assert find_failure(make_chain()).startswith("first 3 tokens")


def test_uniforms_that_may_be_zero_fail(monkeypatch):
    right = rng.uniform_matrix
    monkeypatch.setattr(rng, "uniform_matrix", lambda keys, count: right(keys, count) - 2.0**-53)
    assert not check_extremes(RULES["match"]).is_passed


def test_every_mutant_is_used_here():
    """A new mutant must be certified too."""
    functions = {
        name
        for name, value in vars(mutants).items()
        if callable(value)
        and getattr(value, "__module__", "") == mutants.__name__
        and not name.startswith(("_", "make_"))
    }
    used = {function.__name__ for function in TARGETS.values()} | {function.__name__ for _, function in NOISE.values()}
    used |= {"race_linearly", "race_with_one_number", "include_zero", "claim_softmax", "NON_STRICT"}
    assert functions - used == set()
