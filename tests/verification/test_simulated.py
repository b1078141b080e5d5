"""Simulated acceptance: the realised rate is the given one, independent of content, and a certificate fails it."""

import math

import pytest
import torch

from foredraft.certify import rule_check
from foredraft.errors import ForedraftError
from foredraft.tree import TokenTree
from foredraft.verification.noise import NoiseTable, SeededNoise
from foredraft.verification.probs import DenseProbs
from foredraft.verification.registry import RULES
from foredraft.verification.simulated import make_simulated_rule

VOCAB, LENGTH = 8, 4
SIGMAS = 4  # bound of a count in standard deviations; seeds are fixed, so the tests always have the same result


def verify_chains(rate: float, num_requests: int, likely: int = 7, seed: int = 0) -> list[list[int]]:
    """Return the accepted paths of chains of token 1 under a target that expects `likely`."""
    tree = TokenTree([[0] + [1] * LENGTH] * num_requests, [list(range(-1, LENGTH))] * num_requests, None)
    p = torch.full((VOCAB,), 0.01, dtype=torch.float64)
    p[likely] = 1.0
    noise = SeededNoise(tree, [(seed, b) for b in range(num_requests)], [9] * num_requests)
    probs = DenseProbs(p.expand(num_requests * (LENGTH + 1), VOCAB))
    return make_simulated_rule(rate).verify(tree, probs, noise).paths


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_the_realised_rate_lies_within_the_binomial_bound(rate: float):
    paths = verify_chains(rate, 2500)
    accepted = sum(len(path) - 1 for path in paths)
    tried = sum(min(len(path), LENGTH) for path in paths)  # the accepted tokens, and the one that was rejected
    assert tried > 3000
    assert abs(accepted - rate * tried) < SIGMAS * math.sqrt(tried * rate * (1 - rate))


def test_ten_thousand_tokens_and_the_acceptance_length():
    rate, num_steps = 0.8, 3200
    lengths = [len(path) for path in verify_chains(rate, num_steps)]  # accepted tokens and the target's own
    assert sum(lengths) > 10_000
    expected = (1 - rate ** (LENGTH + 1)) / (1 - rate)
    weights = [rate**i * (1 - rate if i < LENGTH else 1) for i in range(LENGTH + 1)]
    variance = sum(w * (i + 1 - expected) ** 2 for i, w in enumerate(weights))
    assert abs(sum(lengths) / num_steps - expected) < SIGMAS * math.sqrt(variance / num_steps)


def test_the_content_does_not_matter_and_the_seed_does():
    assert verify_chains(0.5, 50, likely=1) == verify_chains(0.5, 50, likely=7)
    assert verify_chains(0.5, 50) != verify_chains(0.5, 50, seed=1)
    assert all(len(path) == 1 for path in verify_chains(0.0, 50, likely=1))
    assert all(len(path) == LENGTH + 1 for path in verify_chains(1.0, 50, likely=7))


def test_the_last_token_is_the_target_s_and_never_the_rejected_one():
    """Guards the count of accepted tokens, which includes a last token that is in the draft."""
    tree = TokenTree([[0, 1, 1]], [[-1, 0, 1]], None)
    p = torch.eye(3, dtype=torch.float64)[[2, 2, 0]]
    table = torch.full((1, 3), 0.5, dtype=torch.float64)
    commit = make_simulated_rule(1.0).verify(tree, DenseProbs(p), NoiseTable(None, table, table))
    assert (commit.paths, commit.tokens) == ([[0, 1, 2]], [[1, 1, 0]])
    commit = make_simulated_rule(0.4).verify(tree, DenseProbs(p), NoiseTable(None, table, table))
    assert (commit.paths, commit.tokens) == ([[0]], [[2]])
    agreeing = torch.eye(3, dtype=torch.float64)[[1, 1, 1]]
    commit = make_simulated_rule(0.0).verify(tree, DenseProbs(agreeing), NoiseTable(None, table, table))
    assert commit.paths == [[0]]
    assert commit.tokens[0][0] in (0, 2)
    split = torch.tensor([[0.2, 0.8, 0.0]], dtype=torch.float64).expand(3, 3)
    commit = make_simulated_rule(0.0).verify(tree, DenseProbs(split), NoiseTable(None, table, table))
    assert commit.tokens == [[0]]


def test_invalid_logits_end_the_path_before_them_or_fail_the_request():
    tree = TokenTree([[0, 1, 1], [0, 1, 1]], [[-1, 0, 1]] * 2, None)
    p = torch.full((6, 3), 1 / 3, dtype=torch.float64)
    p[1] = p[3] = math.nan
    table = torch.full((2, 3), 0.5, dtype=torch.float64)
    commit = make_simulated_rule(1.0).verify(tree, DenseProbs(p), NoiseTable(None, table, table))
    assert (commit.paths, commit.tokens) == ([[0], []], [[1], []])
    assert commit.failed == {1}


@pytest.mark.parametrize("rate", [-0.1, 1.01, math.nan, math.inf, True, "0.8", None])
def test_a_rate_that_cannot_be_is_refused_with_one_that_can(rate: object):
    with pytest.raises(ForedraftError, match=r"acceptance_rate must lie in \[0, 1\], such as 0.8"):
        make_simulated_rule(rate)  # type: ignore[arg-type]


def test_the_rule_is_declared_lossy_and_no_client_can_choose_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rule_check, "NUM_POINTS", 1 << 10)
    rule = make_simulated_rule(0.8)
    assert not rule.is_lossless
    assert not rule.is_reproducible
    assert rule.name not in RULES
    assert not rule_check.check_rule(rule).is_passed
