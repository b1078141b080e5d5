"""Probabilities on demand equal those of `distribution` for any requested rows, and only those rows are computed."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.sampling import rng
from foredraft.sampling.distribution import distribution
from foredraft.sampling.params import Sampling
from foredraft.sampling.token_sampler import NO_TOKEN
from foredraft.tree import TokenTree
from foredraft.verification import probs
from foredraft.verification.noise import NoiseTable, SeededNoise
from foredraft.verification.probs import DenseProbs, InvalidLogitsError, LazyTargetProbs, Probs
from foredraft.verification.registry import RULES
from foredraft.verification.rules import combine_rules
from tests.support.sampling_cases import SETTINGS, V, make_history


def system(name: str, num_requests: int = 12, seed: int = 0, is_chain: bool = False):
    """Make a ragged batch of trees, its logits with a row or two that are no distribution, and every row's sampling."""
    rng = random.Random(seed)
    names = list(SETTINGS)
    sampling = [
        Sampling(**SETTINGS[names[(b + seed) % len(names)] if name == "mixed" else name]) for b in range(num_requests)
    ]
    sizes = [1 + b % 5 for b in range(num_requests)]
    rows = sum(sizes)
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 2
    logits[rows // 2, 3], logits[rows - 1] = math.nan, -math.inf
    p_free = logits.nan_to_num(0, 0, 0)
    parents = [[-1, *(n - 1 if is_chain else rng.randrange(n) for n in range(1, size))] for size in sizes]
    first = [sum(sizes[:b]) for b in range(num_requests)]
    tokens = [[0, *(int(p_free[first[b] + p].argmax()) for p in links[1:])] for b, links in enumerate(parents)]
    tree = TokenTree.from_lists(tokens, parents, (p_free * 0.7).softmax(-1))
    every = [s for s, size in zip(sampling, sizes, strict=True) for _ in range(size)]
    return tree, logits, every, [make_history(rng, s) for s in every]


@pytest.mark.parametrize("name", [*SETTINGS, "mixed"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_decides_by_distributions_on_demand_as_by_a_table_of_all(rule, name):
    """Guards rows, histories, keys and uniforms paired wrongly; the table is the slow reference."""
    accepted = failed = 0
    for seed in range(4):
        tree, logits, every, history = system(name, seed=seed, is_chain=rule == "block")
        seeds, positions = [(seed, b) for b in range(12)], list(range(12))
        p = distribution(logits, every, history)
        slow = RULES[rule].verify(tree, p, NoiseTable.from_seeds(tree, seeds, positions))
        fast = RULES[rule].verify(
            tree, LazyTargetProbs(logits, every, history.__getitem__), SeededNoise(tree, seeds, positions)
        )
        assert fast.paths == slow.paths
        assert fast.tokens == slow.tokens
        assert fast.failed == slow.failed
        accepted += sum(slow.counts) - 12
        failed += len(slow.failed)
    assert accepted > 0
    assert failed > 0


def test_requests_under_different_rules_see_their_own_distributions():
    tree, logits, every, history = system("mixed", is_chain=True)
    rules = [list(RULES.values())[b % len(RULES)] for b in range(12)]
    seeds, positions = [(1, b) for b in range(12)], [5] * 12
    slow = combine_rules(rules)(
        tree, distribution(logits, every, history), NoiseTable.from_seeds(tree, seeds, positions)
    )
    fast = combine_rules(rules)(
        tree, LazyTargetProbs(logits, every, history.__getitem__), SeededNoise(tree, seeds, positions)
    )
    assert fast.tokens == slow.tokens
    assert fast.failed == slow.failed


@pytest.mark.parametrize("name", ["hot", "greedy with penalties", "everything"])
@pytest.mark.parametrize("rule", RULES)
def test_only_visited_nodes_get_a_distribution_and_a_history(rule, name, monkeypatch):
    """Guards the point of it all: the work of a node that no walk reaches."""
    tree, logits, every, history = system(name, is_chain=rule == "block")
    asked, computed, compute = [], [], probs._compute_masses

    def record(sampler, x, rows, samplings):
        computed.extend(rows)
        return compute(sampler, x, rows, samplings)

    monkeypatch.setattr(probs, "_compute_masses", record)
    commit = RULES[rule].verify(
        tree,
        LazyTargetProbs(logits, every, lambda row: asked.append(row) or history[row]),
        SeededNoise(tree, [(0, b) for b in range(12)], [0] * 12),
    )
    visited = {tree.get_row(b, node) for b, path in enumerate(commit.paths) for node in path}
    if name == "hot" and rule != "match":  # no setting reads the history, and rows are counted as they are computed
        assert not asked
        asked = computed
    assert visited <= set(asked)
    if rule in ("match", "reject"):
        assert len(set(asked)) <= len(visited) + 2 * len(commit.failed)
        assert len(set(asked)) < tree.row_offsets[-1]


@pytest.mark.parametrize("root_step", [0, 1, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_is_that_of_distribution(name, root_step):
    """Also if some rows are computed together."""
    _, logits, every, history = system(name)
    root_rows = range(0, len(logits), root_step) if root_step else ()
    lazy, p = LazyTargetProbs(logits, every, history.__getitem__, root_rows), distribution(logits, every, history)
    for row in random.Random(0).sample(range(len(p)), len(p)):
        assert torch.equal(lazy.get_dense_row(row).nan_to_num(-1), p[row].nan_to_num(-1))
        if p[row].isnan().any():
            with pytest.raises(InvalidLogitsError):
                lazy.get_probs(row)
            assert lazy.sample_tokens([row], lambda _: 3) == [NO_TOKEN]
            continue
        dense = (p[row].double() / p[row].double().sum()).numpy()
        np.testing.assert_allclose(lazy.get_probs(row).gather(None), dense, rtol=1e-12)
        assert lazy.sample_tokens([row], lambda i: i * 77) == [
            int(rng.exponential_race(p[row : row + 1], torch.tensor([row * 77])).argmax())
        ]


@pytest.mark.parametrize("num_roots", [0, 3, 6])
@pytest.mark.parametrize("size", [5, 1000, 9001])
def test_masses_computed_natively_are_those_of_the_row_of_probabilities(size, num_roots, monkeypatch):
    """Guards two ways to one distribution that differ in a bit or in the ids that they keep."""
    monkeypatch.setattr(probs, "MIN_ROWS_PER_CALL", 2)  # the roots take up to three calls
    monkeypatch.setattr(probs, "MAX_MASSES_PER_CALL", 1)
    x = torch.randn(6, size, generator=torch.Generator().manual_seed(size)) * 2
    for sampling in (Sampling(), Sampling(top_p=0.9), Sampling(top_k=3), Sampling(typical_p=0.5), Sampling(min_p=1e-6)):
        lazy, p = LazyTargetProbs(x, [sampling] * 6, None, range(num_roots)), distribution(x, sampling)
        for row in range(6):
            found, expected = lazy.get_probs(row), Probs.from_row(p[row])
            assert np.array_equal(found.mass, expected.mass)
            assert (found.ids is None) == (expected.ids is None)
            assert found.ids is None or np.array_equal(found.ids, expected.ids)


def test_bfloat16_logits_are_looked_at_in_single_precision():
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    for sampling in (Sampling(), Sampling(top_p=0.9), Sampling(temperature=0)):
        lazy, p = LazyTargetProbs(logits, [sampling] * 6), distribution(logits, sampling)
        assert lazy.sample_tokens(range(6), lambda i: i) == DenseProbs(p).sample_tokens(range(6), lambda i: i)


numbers = st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5, 2.0, 1e-9]), min_size=9, max_size=9).filter(any)


@given(numbers, numbers, st.floats(0, 1), st.floats(0.001, 0.999))
def test_arithmetic_on_few_tokens_is_that_on_all(a, b, weight, u):
    """A distribution of few tokens leaves the others out; the dense one is the reference."""
    p, q = np.array(a), np.array(b)

    def sparse(x: np.ndarray) -> Probs:
        return Probs(x[x > 0], 9, np.flatnonzero(x))

    expected = np.maximum(weight * p - q, 0)
    for left in (Probs(p, 9), sparse(p)):
        for right in (Probs(q, 9), sparse(q)):
            rest = left.compute_residual(right, weight)
            assert rest.gather(None).tolist() == expected.tolist()
            assert (
                rest.normalise(left).gather(None).tolist() == (expected / rest.total if rest.total > 0 else p).tolist()
            )
        assert [left[x] for x in range(9)] == a
        assert left.gather(np.array([3, 0, 8])).tolist() == [a[3], a[0], a[8]]
        assert left.sample(u) == Probs(p, 9).sample(u)
        assert p[left.sample(u)] > 0
    assert sparse(p).entropy == pytest.approx(Probs(p, 9).entropy)
    assert Probs(q, 9).exclude(4).gather(None).tolist() == [0.0 if x == 4 else q[x] for x in range(9)]
