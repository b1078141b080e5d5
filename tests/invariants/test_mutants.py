"""The invariants can fail: each of their checkers passes the real system and kills every fault seeded for it."""

import numpy as np
import pytest
import torch

from foredraft.certify.extremes import find_state, to_signed
from foredraft.sampling import rng
from foredraft.sampling.distribution import distribution
from foredraft.verification.registry import RULES
from tests.support import mutants
from tests.support.edge_cases import EDGES, find_impossible_tokens
from tests.support.sampling_cases import measure_largest_error
from tests.support.statistical_checks import ALPHA, chi_square
from tests.support.step_scenarios import (
    SETTINGS,
    StepScenario,
    SystemUnderTest,
    compute_p_value,
    decode_plainly,
    generate,
    measure_step_tv,
)

BOUND = 5e-5


def world_of(setting: str, **more) -> StepScenario:
    sampling, end_ids = SETTINGS[setting]
    return StepScenario(sampling=sampling, end_ids=end_ids, size=6, **more)


PLAIN = (world_of("T 1"), world_of("top-p 0.9", q_kind="far"))
TREE = (StepScenario(size=4, parents=(-1, 0, 0, 0)), StepScenario(size=4, parents=(-1, 0, 0, 1, 1), q_kind="far"))


def is_killed(system: SystemUnderTest, worlds=PLAIN, is_block: bool = False) -> bool:
    return any(measure_step_tv(system, world, is_block) > BOUND for world in worlds)


# rules, by the exact distribution of a step


def test_the_unchanged_programs_the_mutants_vary_are_the_real_rules():
    """A mutant is killed for its fault and not for its programming."""
    assert not is_killed(SystemUnderTest(mutants.make_reject_rule()))
    assert not is_killed(SystemUnderTest(mutants.make_reject_rule()), TREE)
    assert not is_killed(SystemUnderTest(mutants.make_block_rule()), is_block=True)
    for name, copy in {"reject": mutants.make_reject_rule(), "block": mutants.make_block_rule()}.items():
        runs = [generate(SystemUnderTest(rule), PLAIN[0], 300) for rule in (RULES[name].verify, copy)]
        assert runs[0].texts == runs[1].texts


@pytest.mark.parametrize(
    ("name", "worlds"), [("reject", PLAIN), ("reject", TREE), ("block", PLAIN)], ids=["reject", "reject trees", "block"]
)
def test_the_real_rules_pass_where_the_mutants_die(name, worlds):
    assert not is_killed(SystemUnderTest(RULES[name].verify), worlds, is_block=name == "block")


@pytest.mark.parametrize("name", mutants.REJECTS)
def test_the_distribution_of_a_step_kills_a_fault_of_token_verification(name):
    assert is_killed(SystemUnderTest(mutants.REJECTS[name]))


@pytest.mark.parametrize("name", mutants.TREES)
def test_the_distribution_of_a_step_kills_a_fault_between_siblings(name):
    assert is_killed(SystemUnderTest(mutants.TREES[name]), TREE)


@pytest.mark.parametrize("name", mutants.BLOCKS)
def test_the_distribution_of_a_step_kills_a_fault_of_block_verification(name):
    assert is_killed(SystemUnderTest(mutants.BLOCKS[name]), is_block=True)


def test_the_distribution_of_a_step_kills_typical_acceptance_passed_off_as_lossless():
    assert is_killed(SystemUnderTest(RULES["typical"].verify))


# distributions handed to a rule, by the same checker

FAULTS = {
    "target_unfiltered": ("top-p 0.9", {"target": mutants.skip_draft_filters}),
    "bonus_unfiltered": ("top-k 3", {"target": mutants.skip_bonus_filters}),
    "filters ignored": ("min-p 0.1", {"target": mutants.skip_filters}),
    "q_raw": ("top-p 0.9", {"draft": mutants.skip_filters}),
    "temp_2pct": ("T 1", {"target": mutants.raise_temperature}),
    "bf16_probs": ("T 1", {"target": mutants.round_to_bfloat16}),
    "penalties ignore the draft": ("penalties", {"target": mutants.ignore_draft}),
    "penalties count the last token of a step": ("penalties", {"target": mutants.count_last_draft_only}),
    "bad words ignore the draft": ("bad words", {"target": mutants.ignore_draft}),
    "min_tokens counts steps": ("min tokens", {"target": mutants.count_min_tokens_by_step}),
    "min_tokens ignores the draft": ("min tokens", {"target": mutants.ignore_draft}),
}


@pytest.mark.parametrize("rule", ["reject", "block"])
@pytest.mark.parametrize("name", FAULTS)
def test_the_distribution_of_a_step_kills_a_wrong_distribution_at_any_position(name, rule):
    setting, fault = FAULTS[name]
    worlds = (world_of(setting, q_kind="far"),)
    assert not is_killed(SystemUnderTest(RULES[rule].verify), worlds, rule == "block")
    assert is_killed(SystemUnderTest(RULES[rule].verify, **fault), worlds, rule == "block")


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_the_distribution_of_a_step_kills_a_greedy_draft_that_claims_a_soft_distribution(rule):
    worlds = (world_of("T 1", q_kind="one-hot"),)
    assert not is_killed(SystemUnderTest(RULES[rule].verify), worlds, rule == "block")
    assert is_killed(SystemUnderTest(RULES[rule].verify, draft=mutants.claim_softmax), worlds, rule == "block")


# uniforms, by whole texts. False alarms of the passing halves: 1e-6 each

TEXTS = {
    "u_is_draft_u": ("reject", mutants.reuse_draft_uniforms),
    "uniforms keyed without position": ("reject", mutants.drop_position_from_uniforms),
    "uniforms keyed without seed": ("reject", mutants.drop_seed_from_uniforms),
    "noise keyed without position": ("match", mutants.drop_position_from_keys),
    "noise keyed without seed": ("match", mutants.drop_seed_from_uniforms),
}


@pytest.mark.parametrize("name", ["reject", "match"])
def test_texts_of_the_real_noise_pass_where_the_mutants_die(name):
    world = StepScenario(size=4, q_kind="far")
    assert compute_p_value(SystemUnderTest(RULES[name].verify), world, 5_000, name == "match") > ALPHA


@pytest.mark.parametrize("name", TEXTS)
def test_whole_texts_kill_uniforms_that_are_shared_or_used_twice(name):
    rule, noise = TEXTS[name]
    system = SystemUnderTest(RULES[rule].verify, make_noise=noise)
    assert compute_p_value(system, StepScenario(size=4, q_kind="far"), 5_000, rule == "match") < ALPHA


def test_plain_texts_kill_draws_keyed_by_where_the_step_began():
    """Its distribution is right: only the seed contract shows the fault."""
    world = StepScenario(size=4)
    plain = [decode_plainly(world, seed) for seed in range(50)]
    assert generate(SystemUnderTest(RULES["match"].verify), world, 50, is_match=True).texts == plain
    mutant = SystemUnderTest(RULES["match"].verify, make_noise=mutants.key_by_step)
    assert generate(mutant, world, 50, is_match=True).texts != plain


@pytest.mark.parametrize("rule", ["reject", "typical"])
def test_plain_texts_kill_another_rule_passed_off_as_match(rule):
    world = StepScenario(size=4)
    plain = [decode_plainly(world, seed) for seed in range(50)]
    assert generate(SystemUnderTest(RULES[rule].verify), world, 50).texts != plain


# edges, the race and the bits


def test_directed_uniforms_kill_a_comparison_that_is_not_strict():
    """The fault no statistics can see: it emits an impossible token once in 2^24 uniforms, or at a uniform of zero."""

    def faults(rule) -> int:
        return sum(len(list(find_impossible_tokens(rule, edge))) for edge in EDGES)

    assert faults(RULES["reject"].verify) == 0
    assert faults(mutants.NON_STRICT) > 0


def race_p_value(race) -> float:
    p = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    keys = torch.tensor([rng.derive_key(i) for i in range(20_000)])
    return chi_square(np.bincount(race(p.expand(20_000, -1), keys).argmax(-1), minlength=4), p.numpy())


def test_chi_square_kills_a_race_that_is_not_exponential():
    assert race_p_value(rng.exponential_race) > ALPHA
    assert race_p_value(mutants.race_linearly) < ALPHA
    assert race_p_value(mutants.race_with_one_number) < ALPHA


def test_extreme_bits_kill_uniforms_that_may_be_zero():
    keys = torch.tensor([to_signed(find_state(0))])
    assert rng.uniform_matrix(keys, 1).item() > 0
    assert not mutants.include_zero(keys, 1).item() > 0


# parameters, by the slow reference

PARAMETERS = {
    "nucleus before temperature": ("everything", mutants.filter_before_temperature),
    "presence of the prompt": ("presence", mutants.count_prompt_presence),
    "frequency of the prompt": ("frequency", mutants.count_prompt_presence),
    "repetition of the output alone": ("repetition", mutants.count_output_repetition),
    "bias after the filters": ("everything", mutants.add_bias_after_filters),
    "filters ignored": ("all filters", mutants.skip_filters),
    "draft ignored": ("bad words", mutants.ignore_draft),
    "two per cent": ("plain", mutants.raise_temperature),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_slow_reference_kills_a_parameter_applied_wrongly(name):
    setting, compute = PARAMETERS[name]
    assert measure_largest_error(distribution, setting) < 1e-12
    assert measure_largest_error(compute, setting) > 1e-6


def test_there_are_enough_mutants():
    rules = [*mutants.REJECTS, *mutants.TREES, *mutants.BLOCKS]
    assert len(rules) + len(FAULTS) + len(TEXTS) + len(PARAMETERS) >= 40


def test_the_sampling_the_mutants_are_filtered_with_cuts_something():
    world = PLAIN[1]
    assert (world.target_probs == 0).any()
    assert (world.compute_claimed(SystemUnderTest(RULES["reject"].verify)) == 0).any()
