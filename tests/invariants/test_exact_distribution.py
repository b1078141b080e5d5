"""Every lossless rule, under every sampling parameter and for every quality of draft, keeps the target's distribution.

Two checkers share the work. `compute_step_distribution` integrates one whole step over all its uniforms, exactly: with
K = 2 that is the joint distribution of the first three tokens, 512 cells, to about 1e-8. 200,000 samples have a noise
floor of 0.02. `generate` samples whole texts with the real noise, and so detects uniforms that are shared or used
twice.
"""

import os

import numpy as np
import pytest
import torch

from foredraft.sampling import rng
from foredraft.sampling.rng import NoiseStream, exponential_race
from foredraft.verification.registry import RULES
from tests.support.statistical_checks import ALPHA, chi_square, total_variation
from tests.support.step_scenarios import (
    OUTPUT,
    PROMPT,
    Q_KINDS,
    SETTINGS,
    StepScenario,
    SystemUnderTest,
    compute_p_value,
    compute_step_distribution,
    decode_plainly,
    generate,
)

BOUND = 5e-5
# rules integrated over uniforms, and whether they are block verification; test_spectr.py has independent samples
BLOCKS = {"reject": False, "block": True, "spectr": False}


def world_of(setting: str, q_kind: str, **more) -> StepScenario:
    sampling, end_ids = SETTINGS[setting]
    return StepScenario(seed=Q_KINDS.index(q_kind), sampling=sampling, end_ids=end_ids, q_kind=q_kind, **more)


def test_every_rule_that_claims_to_be_lossless_is_tested_here():
    assert {name for name, rule in RULES.items() if rule.is_lossless} == {*BLOCKS, "match"}


@pytest.mark.parametrize("q_kind", Q_KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_step_keeps_the_joint_distribution_of_three_tokens(setting, q_kind):
    """Guards wrong residuals, unfiltered probabilities at one position, a raw q, penalties without the drafted prefix.

    The check is exact, so it raises no false alarm. If theory gives the number of accepted tokens, that is checked too.
    """
    world = world_of(setting, q_kind)
    steps = {
        name: compute_step_distribution(SystemUnderTest(RULES[name].verify), world, is_block)
        for name, is_block in BLOCKS.items()
    }
    for name, step in steps.items():
        assert total_variation(step.joint, world.joint) < BOUND, name
        # cells of the integral whose volume is rounding alone, at the uniform 1.0, count less than this
        assert step.joint[world.joint == 0].sum() < 1e-20, name
    reject, block = steps["reject"], steps["block"]
    assert block.mean_accepted >= reject.mean_accepted - 1e-9
    assert steps["spectr"].mean_accepted == pytest.approx(reject.mean_accepted, abs=1e-7)
    if q_kind == "equal":
        assert reject.mean_accepted == pytest.approx(2, abs=1e-6)
        assert block.mean_accepted == pytest.approx(2, abs=1e-6)
    elif q_kind == "disjoint":
        assert reject.accepts == block.accepts == 0
    elif q_kind == "near" and setting not in ("greedy", "top-k 1"):
        assert min(reject.accepts, reject.rejects, block.accepts, block.rejects) > 0
    elif q_kind == "far":
        assert min(reject.rejects, block.rejects) > 0


@pytest.fixture(scope="module")
def token_keys() -> torch.Tensor:
    """Return [positions, N], the noise of the target's samples."""
    start = len(PROMPT) + len(OUTPUT)
    rows = [[rng.derive_key(s, 0, NoiseStream.TOKEN, start + i) for s in range(200_000)] for i in range(3)]
    return torch.tensor(rows)


@pytest.mark.parametrize("setting", SETTINGS)
def test_keyed_noise_draws_texts_of_the_target(setting, token_keys):
    """Whole texts of three tokens under `match`, N = 200,000. False alarm 1e-6 for all settings together."""
    world = world_of(setting, "near")
    p = torch.tensor(world.target_probs)
    row = torch.zeros(token_keys.shape[1], dtype=torch.int64)
    index = torch.zeros_like(row)
    offsets = [0, 1, 1 + world.size]
    for i in range(3):
        token = exponential_race(p[row], token_keys[i]).argmax(-1)
        index = index * world.size + token
        row = offsets[i + 1] + index if i < 2 else row
    counts = np.bincount(index, minlength=world.size**3)
    assert chi_square(counts, world.joint) > ALPHA / len(SETTINGS)


@pytest.mark.parametrize("q_kind", Q_KINDS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_match_writes_the_plain_text_of_the_seed_whatever_the_draft(setting, q_kind):
    """Guards the seed contract: same seed, same text, with or without speculation. No odds: texts are equal or not."""
    world = world_of(setting, q_kind)
    plain = [decode_plainly(world, seed) for seed in range(100)]
    system = SystemUnderTest(RULES["match"].verify)
    runs = [generate(system, world, 100, is_match=True, num_drafts=k) for k in (0, 1, 2)]
    for run in runs:
        assert run.texts == plain
    assert runs[0].num_accepted == runs[0].num_rejected == 0
    if q_kind == "equal":
        assert runs[2].num_rejected == 0
    elif q_kind == "near" and setting not in ("greedy", "top-k 1"):
        assert runs[2].num_accepted > 0
        assert runs[2].num_rejected > 0
    elif q_kind == "disjoint":
        assert runs[2].num_accepted == 0


@pytest.mark.parametrize("setting", ["T 1", "everything"])
@pytest.mark.parametrize("name", ["match", *BLOCKS])
def test_texts_drawn_with_the_real_noise_follow_the_target(name, setting):
    """Guards uniforms shared between positions, steps or purposes. N = 8,000; false alarm 1e-6 for the six together."""
    world = world_of(setting, "near")
    run = generate(SystemUnderTest(RULES[name].verify), world, 8_000, is_match=name == "match")
    assert run.num_accepted > 0
    assert run.num_rejected > 0
    assert chi_square(run.counts(world), world.joint) > ALPHA / 8


@pytest.mark.soak
@pytest.mark.parametrize("q_kind", ["near", "far", "one-hot"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["match", *BLOCKS])
def test_many_texts_drawn_with_the_real_noise_follow_the_target(name, setting, q_kind):
    """N = 50,000 for each of the 180 cases, or DISTRIBUTION_SAMPLES; false alarm 1e-6 for all of them together."""
    world = world_of(setting, q_kind)
    count = int(os.environ.get("DISTRIBUTION_SAMPLES", "50000"))
    assert compute_p_value(SystemUnderTest(RULES[name].verify), world, count, is_match=name == "match") > ALPHA / 180
