"""The law tests can fail: each of their checkers passes the real thing and kills every fault seeded for it."""

import numpy as np
import pytest
import torch

import mutants
from bits import seed_giving, signed
from edges import EDGES, impossible_tokens
from foredraft import noise
from foredraft.sampling import distribution
from foredraft.verify import RULES
from parameters import faults_of_law
from stats import ALPHA, chi_square
from worlds import SETTINGS, System, World, generate, p_value_of_texts, plain_text, tv_of_step

BOUND = 5e-5


def world_of(setting: str, **more) -> World:
    sampling, end_ids = SETTINGS[setting]
    return World(sampling=sampling, end_ids=end_ids, size=6, **more)


PLAIN = (world_of("T 1"), world_of("top-p 0.9", q_kind="far"))
TREE = (World(size=4, parents=(-1, 0, 0, 0)), World(size=4, parents=(-1, 0, 0, 1, 1), q_kind="far"))


def is_killed(system: System, worlds=PLAIN, is_block: bool = False) -> bool:
    return any(tv_of_step(system, world, is_block) > BOUND for world in worlds)


# rules, by the exact law of a step


def test_the_unchanged_programs_the_mutants_vary_are_the_real_rules():
    """A mutant is killed for its fault and not for its programming."""
    assert not is_killed(System(mutants.reject_like()))
    assert not is_killed(System(mutants.reject_like()), TREE)
    assert not is_killed(System(mutants.block_like()), is_block=True)
    for name, copy in {"reject": mutants.reject_like(), "block": mutants.block_like()}.items():
        runs = [generate(System(rule), PLAIN[0], 300) for rule in (RULES[name], copy)]
        assert runs[0].texts == runs[1].texts


@pytest.mark.parametrize(
    ("name", "worlds"), [("reject", PLAIN), ("reject", TREE), ("block", PLAIN)], ids=["reject", "reject trees", "block"]
)
def test_the_real_rules_pass_where_the_mutants_die(name, worlds):
    assert not is_killed(System(RULES[name]), worlds, is_block=name == "block")


@pytest.mark.parametrize("name", mutants.REJECTS)
def test_the_law_of_a_step_kills_a_fault_of_token_verification(name):
    assert is_killed(System(mutants.REJECTS[name]))


@pytest.mark.parametrize("name", mutants.TREES)
def test_the_law_of_a_step_kills_a_fault_between_siblings(name):
    assert is_killed(System(mutants.TREES[name]), TREE)


@pytest.mark.parametrize("name", mutants.BLOCKS)
def test_the_law_of_a_step_kills_a_fault_of_block_verification(name):
    assert is_killed(System(mutants.BLOCKS[name]), is_block=True)


def test_the_law_of_a_step_kills_typical_acceptance_passed_off_as_lossless():
    assert is_killed(System(RULES["typical"]))


# laws handed to a rule, by the same checker

LAWS = {
    "target_unfiltered": ("top-p 0.9", {"target": mutants.unfiltered_in_the_draft}),
    "bonus_unfiltered": ("top-k 3", {"target": mutants.unfiltered_bonus}),
    "filters ignored": ("min-p 0.1", {"target": mutants.unfiltered}),
    "q_raw": ("top-p 0.9", {"draft": mutants.unfiltered}),
    "temp_2pct": ("T 1", {"target": mutants.warmer}),
    "bf16_probs": ("T 1", {"target": mutants.rounded}),
    "penalties ignore the draft": ("penalties", {"target": mutants.ignoring_the_draft}),
    "penalties count the last token of a step": ("penalties", {"target": mutants.last_drafted_alone}),
    "bad words ignore the draft": ("bad words", {"target": mutants.ignoring_the_draft}),
    "min_tokens counts steps": ("min tokens", {"target": mutants.min_tokens_by_steps}),
    "min_tokens ignores the draft": ("min tokens", {"target": mutants.ignoring_the_draft}),
}


@pytest.mark.parametrize("rule", ["reject", "block"])
@pytest.mark.parametrize("name", LAWS)
def test_the_law_of_a_step_kills_a_wrong_law_at_any_position(name, rule):
    setting, fault = LAWS[name]
    worlds = (world_of(setting, q_kind="far"),)
    assert not is_killed(System(RULES[rule]), worlds, rule == "block")
    assert is_killed(System(RULES[rule], **fault), worlds, rule == "block")


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_the_law_of_a_step_kills_a_greedy_draft_that_claims_a_soft_law(rule):
    worlds = (world_of("T 1", q_kind="one-hot"),)
    assert not is_killed(System(RULES[rule]), worlds, rule == "block")
    assert is_killed(System(RULES[rule], draft=mutants.softly_claimed), worlds, rule == "block")


# coins, by whole texts. False alarms of the passing halves: 1e-6 each

TEXTS = {
    "u_is_draft_u": ("reject", mutants.coins_of_the_draft),
    "coins keyed without position": ("reject", mutants.coins_without_position),
    "coins keyed without seed": ("reject", mutants.coins_without_seed),
    "noise keyed without position": ("match", mutants.keys_without_position),
    "noise keyed without seed": ("match", mutants.coins_without_seed),
}


@pytest.mark.parametrize("name", ["reject", "match"])
def test_texts_of_the_real_noise_pass_where_the_mutants_die(name):
    world = World(size=4, q_kind="far")
    assert p_value_of_texts(System(RULES[name]), world, 5_000, name == "match") > ALPHA


@pytest.mark.parametrize("name", TEXTS)
def test_whole_texts_kill_coins_that_are_shared_or_used_twice(name):
    rule, coins = TEXTS[name]
    system = System(RULES[rule], coins=coins)
    assert p_value_of_texts(system, World(size=4, q_kind="far"), 5_000, rule == "match") < ALPHA


def test_plain_texts_kill_draws_keyed_by_where_the_step_began():
    """Its law is right: only the seed contract tells."""
    world = World(size=4)
    plain = [plain_text(world, seed) for seed in range(50)]
    assert generate(System(RULES["match"]), world, 50, is_match=True).texts == plain
    mutant = System(RULES["match"], coins=mutants.keys_by_step)
    assert generate(mutant, world, 50, is_match=True).texts != plain


@pytest.mark.parametrize("rule", ["reject", "typical"])
def test_plain_texts_kill_another_rule_passed_off_as_match(rule):
    world = World(size=4)
    plain = [plain_text(world, seed) for seed in range(50)]
    assert generate(System(RULES[rule]), world, 50).texts != plain


# edges, the race and the bits


def test_directed_coins_kill_a_comparison_that_is_not_strict():
    """The fault no statistics can see: it emits an impossible token once in 2^24 coins, or at a coin of zero."""

    def faults(rule) -> int:
        return sum(len(list(impossible_tokens(rule, edge))) for edge in EDGES)

    assert faults(RULES["reject"]) == 0
    assert faults(mutants.NON_STRICT) > 0


def race_p_value(race) -> float:
    p = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64)
    keys = torch.tensor([noise.key(i) for i in range(20_000)])
    return chi_square(np.bincount(race(p.expand(20_000, -1), keys).argmax(-1), minlength=4), p.numpy())


def test_chi_square_kills_a_race_that_is_not_exponential():
    assert race_p_value(noise.race) > ALPHA
    assert race_p_value(mutants.linear_race) < ALPHA
    assert race_p_value(mutants.race_of_one_number) < ALPHA


def test_extreme_bits_kill_uniforms_that_may_be_zero():
    keys = torch.tensor([signed(seed_giving(0))])
    assert noise.uniforms(keys, 1).item() > 0
    assert not mutants.closed_uniforms(keys, 1).item() > 0


# parameters, by the slow reference

PARAMETERS = {
    "nucleus before temperature": ("everything", mutants.nucleus_before_temperature),
    "presence of the prompt": ("presence", mutants.presence_of_the_prompt),
    "frequency of the prompt": ("frequency", mutants.presence_of_the_prompt),
    "repetition of the output alone": ("repetition", mutants.repetition_of_the_output),
    "bias after the filters": ("everything", mutants.bias_after_the_filters),
    "filters ignored": ("all filters", mutants.unfiltered),
    "draft ignored": ("bad words", mutants.ignoring_the_draft),
    "two per cent": ("plain", mutants.warmer),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_slow_reference_kills_a_parameter_applied_wrongly(name):
    setting, law = PARAMETERS[name]
    assert faults_of_law(distribution, setting) < 1e-12
    assert faults_of_law(law, setting) > 1e-6


def test_there_are_enough_mutants():
    rules = [*mutants.REJECTS, *mutants.TREES, *mutants.BLOCKS]
    assert len(rules) + len(LAWS) + len(TEXTS) + len(PARAMETERS) >= 40


def test_the_sampling_the_mutants_are_filtered_with_cuts_something():
    world = PLAIN[1]
    assert (world.truth == 0).any()
    assert (world.claimed(System(RULES["reject"])) == 0).any()
