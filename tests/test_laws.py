"""Laws on demand are the laws of `distribution`, whichever rows are asked for, and only those are made."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft import noise
from foredraft.laws import NO_LAW, Law, Laws, NotALawError, Table
from foredraft.sampling import Sampling, distribution
from foredraft.tree import TokenTree
from foredraft.verify import RULES, Coins, Keyed, per_request
from parameters import SETTINGS, V, history_of


def system(name: str, num_requests: int = 12, seed: int = 0, is_chain: bool = False):
    """A ragged batch of trees, its logits with a row or two that are no law, and the sampling of every row."""
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
    tree = TokenTree.of(tokens, parents, (p_free * 0.7).softmax(-1))
    every = [s for s, size in zip(sampling, sizes, strict=True) for _ in range(size)]
    return tree, logits, every, [history_of(rng, s) for s in every]


@pytest.mark.parametrize("name", [*SETTINGS, "mixed"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_decides_by_laws_on_demand_as_by_a_table_of_all(rule, name):
    """Guards rows, histories, keys and coins paired wrongly; the table is the slow reference."""
    accepted = failed = 0
    for seed in range(4):
        tree, logits, every, history = system(name, seed=seed, is_chain=rule == "block")
        seeds, positions = [(seed, b) for b in range(12)], list(range(12))
        p = distribution(logits, every, history)
        slow = RULES[rule](tree, p, Coins.of(tree, seeds, positions))
        fast = RULES[rule](tree, Laws(logits, every, history.__getitem__), Keyed(tree, seeds, positions))
        assert fast.path_lists == slow.path_lists
        assert fast.token_lists == slow.token_lists
        assert fast.failed == slow.failed
        accepted += sum(slow.counts) - 12
        failed += len(slow.failed)
    assert accepted > 0
    assert failed > 0


def test_requests_under_different_rules_see_their_own_laws():
    tree, logits, every, history = system("mixed", is_chain=True)
    names = [list(RULES)[b % len(RULES)] for b in range(12)]
    seeds, positions = [(1, b) for b in range(12)], [5] * 12
    slow = per_request(names)(tree, distribution(logits, every, history), Coins.of(tree, seeds, positions))
    fast = per_request(names)(tree, Laws(logits, every, history.__getitem__), Keyed(tree, seeds, positions))
    assert fast.token_lists == slow.token_lists
    assert fast.failed == slow.failed


@pytest.mark.parametrize("name", ["hot", "greedy with penalties", "everything"])
@pytest.mark.parametrize("rule", RULES)
def test_only_visited_nodes_get_a_law_and_a_history(rule, name):
    """Guards the point of it all: the work of a node that no walk reaches."""
    tree, logits, every, history = system(name, is_chain=rule == "block")
    asked = []
    commit = RULES[rule](
        tree,
        Laws(logits, every, lambda row: asked.append(row) or history[row]),
        Keyed(tree, [(0, b) for b in range(12)], [0] * 12),
    )
    visited = {tree.row(b, node) for b, path in enumerate(commit.path_lists) for node in path}
    assert visited <= set(asked)
    if rule in ("match", "reject"):
        assert len(set(asked)) <= len(visited) + 2 * len(commit.failed)
        assert len(set(asked)) < tree.first_rows[-1]


def test_choice_holds_the_draws_that_were_made():
    tree, logits, every, _ = system("plain")
    commit = RULES["match"](tree, Laws(logits, every), Keyed(tree, [(0, b) for b in range(12)], [0] * 12))
    for b, (path, tokens) in enumerate(zip(commit.path_lists, commit.token_lists, strict=True)):
        assert [int(commit.choice[tree.row(b, node)]) for node in path] == tokens
    assert (commit.choice == NO_LAW).any()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_row_is_that_of_distribution(name):
    _, logits, every, history = system(name)
    laws, p = Laws(logits, every, history.__getitem__), distribution(logits, every, history)
    for row in random.Random(0).sample(range(len(p)), len(p)):
        assert torch.equal(laws.p(row).nan_to_num(-1), p[row].nan_to_num(-1))
        if p[row].isnan().any():
            with pytest.raises(NotALawError):
                laws.law(row)
            assert laws.tokens([row], lambda _: 3) == [NO_LAW]
            continue
        dense = (p[row].double() / p[row].double().sum()).numpy()
        np.testing.assert_allclose(laws.law(row).over(None), dense, rtol=1e-12)
        assert laws.tokens([row], lambda i: i * 77) == [
            int(noise.race(p[row : row + 1], torch.tensor([row * 77])).argmax())
        ]


def test_bfloat16_logits_are_looked_at_in_single_precision():
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    for sampling in (Sampling(), Sampling(top_p=0.9), Sampling(temperature=0)):
        laws, p = Laws(logits, [sampling] * 6), distribution(logits, sampling)
        assert laws.tokens(range(6), lambda i: i) == Table(p).tokens(range(6), lambda i: i)


numbers = st.lists(st.sampled_from([0.0, 0.0, 0.0, 0.1, 0.5, 2.0, 1e-9]), min_size=9, max_size=9).filter(any)


@given(numbers, numbers, st.floats(0, 1), st.floats(0.001, 0.999))
def test_arithmetic_on_few_tokens_is_that_on_all(a, b, weight, u):
    """A law of few tokens leaves the others out; the dense one is the reference."""
    p, q = np.array(a), np.array(b)

    def sparse(x: np.ndarray) -> Law:
        return Law(x[x > 0], 9, np.flatnonzero(x))

    expected = np.maximum(weight * p - q, 0)
    for left in (Law(p, 9), sparse(p)):
        for right in (Law(q, 9), sparse(q)):
            rest = left.residual(right, weight)
            assert rest.over(None).tolist() == expected.tolist()
            assert rest.scaled(left).over(None).tolist() == (expected / rest.total if rest.total > 0 else p).tolist()
        assert [left[x] for x in range(9)] == a
        assert left.over(np.array([3, 0, 8])).tolist() == [a[3], a[0], a[8]]
        assert left.draw(u) == Law(p, 9).draw(u)
        assert p[left.draw(u)] > 0
    assert sparse(p).entropy == pytest.approx(Law(p, 9).entropy)
    assert Law(q, 9).without(4).over(None).tolist() == [0.0 if x == 4 else q[x] for x in range(9)]
