"""Merging of drafts with replacement and ordinary ones keeps the target's distribution, by exact enumeration.

Guards samples with replacement that a merge forgets or gives to other nodes, and a second trial of a token that an
earlier drafter sampled too.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft.drafters.draft import Draft
from foredraft.drafters.ensemble.tree_merge import MergedTree, stack_trees
from foredraft.engine.tree_validation import find_tree_fault
from foredraft.request import Batch
from foredraft.sampling.params import Sampling
from foredraft.tree import SampledSiblings, TokenTree
from foredraft.verification.registry import RULES
from tests.support.exact_steps import ROOT_TOKEN, TableModels, compute_step, count_contexts, enumerate_trees
from tests.support.requests import make_request

V, LENGTH = 3, 3
REQUEST = make_request(0, [ROOT_TOKEN], Sampling(), rule=RULES["spectr"])
BATCH = Batch((REQUEST,), (1,), (12,))
RULE_NAMES = ["spectr", "reject"]


def make_models(seed: int) -> TableModels:
    rng = np.random.default_rng(seed)
    p, q = np.exp(1.2 * rng.standard_normal((2, count_contexts(V, LENGTH), V)))
    return TableModels(p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True), LENGTH)


MODELS = make_models(0)
OTHER = replace(MODELS, q=make_models(1).q)  # another drafter of the same target


def enumerate_ordinary_trees() -> Iterator[tuple[float, TokenTree]]:
    """Enumerate two siblings without replacement of the other drafter."""
    q = OTHER.q[0]
    rows = torch.tensor(np.stack([q, q * 0, q * 0]))
    for first in range(V):
        for second in range(V):
            if first != second:
                mass = float(q[first] * q[second] / (1 - q[first]))
                yield mass, TokenTree([[ROOT_TOKEN, first, second]], [[-1, 0, 0]], rows)


def merge(first: TokenTree, second: TokenTree, guess: Draft) -> TokenTree:
    joint = MergedTree.from_tree(first, 0, 0)
    joint.graft_samples(second, 0, 0)
    joint.graft(guess, 12)
    return stack_trees(BATCH, [joint])


CHAINS = (-1, 0, 0, 1, 2)
MEMBERS = {
    "chains, then siblings": lambda: (enumerate_trees(MODELS, CHAINS), enumerate_ordinary_trees()),
    "siblings, then chains": lambda: (enumerate_ordinary_trees(), enumerate_trees(MODELS, CHAINS)),
    "chains of two drafters": lambda: (enumerate_trees(MODELS, CHAINS), enumerate_trees(OTHER, (-1, 0, 0))),
    "samples of one drafter twice": lambda: (enumerate_trees(MODELS, (-1, 0, 0)), enumerate_trees(MODELS, (-1, 0, 0))),
}


def enumerate_merges(name: str, guess: Draft) -> Iterator[tuple[float, TokenTree]]:
    ours, theirs = map(list, MEMBERS[name]())
    for mass, first in ours:
        for other_mass, second in theirs:
            yield mass * other_mass, merge(first, second, guess)


@pytest.mark.parametrize("guess", [Draft(), Draft.from_chain([1, 2])], ids=["", "and a deterministic chain"])
@pytest.mark.parametrize("rule", RULE_NAMES)
@pytest.mark.parametrize("name", MEMBERS)
def test_merges_with_independent_samples_keep_the_joint_distribution(name, rule, guess):
    joint, accepted = compute_step(RULES[rule].verify, MODELS, enumerate_merges(name, guess))
    assert np.abs(joint - MODELS.compute_joint()).max() < 1e-12
    alone = compute_step(RULES[rule].verify, MODELS, MEMBERS[name]()[0])[1]
    assert accepted > alone + 1e-3


@pytest.mark.parametrize("rule", RULE_NAMES)
def test_the_acceptance_shows_samples_that_a_merge_forgets(rule):
    """They would count as deterministic, which is lossless."""
    name = "siblings, then chains"
    forgetful = ((mass, replace(tree, further_samples=None)) for mass, tree in enumerate_merges(name, Draft()))
    joint, fewer = compute_step(RULES[rule].verify, MODELS, forgetful)
    assert np.abs(joint - MODELS.compute_joint()).max() < 1e-12
    assert fewer < compute_step(RULES[rule].verify, MODELS, enumerate_merges(name, Draft()))[1] - 1e-3


def test_a_merged_tree_passes_the_sandbox_and_a_foreign_child_does_not():
    _, tree = next(enumerate_merges("siblings, then chains", Draft()))
    assert find_tree_fault(BATCH, tree, V) is None
    samples = {(0, 0): (SampledSiblings(torch.tensor(MODELS.q[0]), (1, 1, 7), is_independent=True),)}
    assert "no children of it" in str(find_tree_fault(BATCH, replace(tree, further_samples=samples), V))
