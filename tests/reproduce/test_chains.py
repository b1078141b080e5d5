"""Formulas, acceptance rates and expectations of chains."""

import numpy as np
import pytest
import torch

from foredraft import LLM, Sampling
from foredraft.outputs import Completion, Stats
from foredraft.reproduce import acceptance
from foredraft.reproduce.chain_points import ChainPoint, compute_formula, count_verified, solve_alpha
from foredraft.reproduce.chain_ratios import (
    ChainRecorder,
    build_expected_point,
    expect_block,
    expect_token_wise,
)
from foredraft.tree import TokenTree
from foredraft.verification.noise import NoiseTable
from foredraft.verification.rules import BLOCK, REJECT, block, reject
from tests.support import tiny_models


def make_point(alpha: float, speed_up: float) -> ChainPoint:
    return ChainPoint("draft", "greedy", 3, alpha, 0.1, speed_up, 1.0)


def test_the_formula_is_that_of_the_paper():
    assert compute_formula(0.8, 5, 0.05) == pytest.approx((1 - 0.8**6) / ((1 - 0.8) * (5 * 0.05 + 1)))
    assert compute_formula(1.0, 4, 0.0) == 5.0
    assert compute_formula(0.0, 4, 0.25) == 0.5


def test_the_rate_for_a_speed_up_solves_the_formula():
    alpha = solve_alpha(2.0, 3, 0.1)
    assert compute_formula(alpha, 3, 0.1) == pytest.approx(2.0)
    assert solve_alpha(5.0, 3, 0.1) is None, "four tokens per pass at most"


@pytest.mark.parametrize(
    ("accepted_at", "expected"),
    [
        ((4, 2, 1), (7, 7 + 4)),  # one of five drafts was accepted whole, the other four end with a rejected token
        ((5, 5, 5), (15, 15)),
        ((), (0, 5)),
    ],
)
def test_a_rejected_draft_has_one_more_verified_token(accepted_at, expected):
    stats = Stats(num_drafts=5, num_accepted=sum(accepted_at), accepted_at=accepted_at)
    assert count_verified(Completion("", [], "length", stats=stats), 3) == expected


def test_a_speed_up_between_two_points_is_interpolated():
    points = [make_point(0.2, 0.8), make_point(0.6, 1.6), make_point(0.8, 2.4)]
    assert acceptance.find_crossing(points, 2.0) == pytest.approx(0.7)
    assert acceptance.find_crossing(points, 0.5) == 0.2
    assert acceptance.find_crossing(points, 3.0) is None
    assert acceptance.interpolate(points, 0.7) == pytest.approx(2.0)
    assert acceptance.interpolate(points, 0.9) is None


def test_the_expectations_of_one_draft():
    assert expect_token_wise((0.5, 2.0, 1.0)) == 0.5 + 0.5 + 0.5
    assert expect_block((0.5, 2.0, 1.0)) == 0.5 + 1.0 + 1.0, "a likelier token makes good for an unlikely one"
    assert expect_block(()) == expect_token_wise(()) == 0.0


def test_block_never_accepts_fewer_of_any_draft():
    ratios = np.random.default_rng(0).lognormal(0, 1, (500, 6)).tolist()
    point = build_expected_point(6, [tuple(row) for row in ratios])
    assert point.num_fewer == 0
    assert point.num_more > 100
    assert point.block > point.token_wise


@pytest.mark.parametrize(("verify", "expect"), [(block, expect_block), (reject, expect_token_wise)])
def test_the_expectation_is_the_mean_of_the_rule(verify, expect):
    """Fault: a formula that is another rule's. 4,000 drafts of three tokens; four standard errors of the difference."""
    generator = torch.Generator().manual_seed(1)
    p, q = torch.rand(2, 4, 5, generator=generator, dtype=torch.float64).pow(2).unbind()
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    differences = []
    for _ in range(4000):
        drafts = [int(torch.multinomial(q[i], 1, generator=generator)) for i in range(3)]
        tree = TokenTree.from_chains([[0, *drafts]], q)
        uniforms = torch.rand(2, 1, 4, generator=generator, dtype=torch.float64)
        commit = verify(tree, p, NoiseTable(None, uniforms[0], uniforms[1]))
        ratios = tuple(float(p[i, x] / q[i, x]) for i, x in enumerate(drafts))
        differences.append(len(commit.paths[0]) - 1 - expect(ratios))
    error = np.std(differences) / len(differences) ** 0.5
    assert abs(np.mean(differences)) < 4 * error


def test_the_recorder_is_token_wise_verification_that_notes_every_ratio():
    generator = torch.Generator().manual_seed(2)
    p, q = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64).unbind()
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    tree = TokenTree.from_chains([[0, 1, 3]], q)
    noise = NoiseTable(None, torch.full((1, 3), 0.4).double(), torch.full((1, 3), 0.7).double())
    recorder = ChainRecorder()
    assert recorder(tree, p, noise).tokens == reject(tree, p, noise).tokens
    assert recorder.chains == [pytest.approx((float(p[0, 1] / q[0, 1]), float(p[1, 3] / q[1, 3])))]


def test_a_run_with_the_recorder_has_its_drafts():
    from dataclasses import replace

    recorder = ChainRecorder()
    spec = {"method": "draft_model", "model": tiny_models.draft()}
    llm = LLM(tiny_models.target(), spec, verify=replace(REJECT, verify=recorder), num_speculative_tokens=3)
    [completion] = llm.generate([[5, 6, 7]], Sampling(temperature=1.0, max_tokens=40, ignore_eos=True))
    assert len(recorder.chains) == completion.stats.num_drafts
    assert sum(map(len, recorder.chains)) == completion.stats.num_drafted
    assert completion.verification == REJECT.name != BLOCK.name
