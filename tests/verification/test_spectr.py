"""K-sequential selection: exact distributions of steps, its acceptance, and seeded faults of it."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft.tree import SampledSiblings, TokenTree
from foredraft.verification.noise import NoiseTable
from foredraft.verification.probs import Probs
from foredraft.verification.registry import RULES
from foredraft.verification.spectr import SequentialSelection, find_rho
from tests.support import spectr_mutants
from tests.support.exact_steps import TableModels, compute_step, count_contexts, enumerate_trees

SPECTR, REJECT = RULES["spectr"].verify, RULES["reject"].verify

# parents of the samples: k chains of n tokens; chains of unequal length; siblings of siblings
SHAPES = {
    "1 x 1": (-1, 0),
    "2 x 1": (-1, 0, 0),
    "3 x 1": (-1, 0, 0, 0),
    "1 x 2": (-1, 0, 1),
    "2 x 2": (-1, 0, 0, 1, 2),
    "3 x 2": (-1, 0, 0, 0, 1, 2, 3),
    "the second is short": (-1, 0, 0, 1),
    "two below each of two": (-1, 0, 0, 1, 1, 2, 2),
}
KINDS = ("far", "near", "equal", "zeros in p", "zeros in q", "zeros in both", "one-hot q", "one-hot p", "disjoint")


def make_models(kind: str, seed: int = 0, size: int = 3, length: int = 3) -> TableModels:
    """Make tables in which p and q relate as `kind` says, in every context."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    p, q = np.exp(1.5 * rng.standard_normal((2, count_contexts(size, length), size)))
    if kind == "near":
        q = p * np.exp(0.4 * rng.standard_normal(p.shape))
    if kind == "equal":
        q = p
    rows, zero = np.arange(len(p)), rng.integers(size, size=len(p))
    if kind in ("zeros in p", "zeros in both"):
        p[rows, zero] = 0
    if kind in ("zeros in q", "zeros in both"):
        q[rows, (zero + 1) % size] = 0
    if kind == "one-hot q":
        q = np.eye(size)[zero]
    if kind == "one-hot p":
        p = np.eye(size)[zero]
    if kind == "disjoint":
        p[:, 0], q[:, 1:] = 0, 0
    return TableModels(p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True), length)


def measure(rule, models: TableModels, shape: str) -> tuple[float, float]:
    """Return the largest error of the joint distribution of three tokens, and the mean number of accepted tokens."""
    joint, accepted = compute_step(rule, models, enumerate_trees(models, SHAPES[shape]))
    return float(np.abs(joint - models.compute_joint()).max()), accepted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["spectr", "reject"])
def test_a_step_with_independent_samples_keeps_the_joint_distribution_of_three_tokens(name, shape, kind):
    """Guards rho, the residual, the order of trials, and the number of samples below an accepted token."""
    models = make_models(kind)
    error, accepted = measure(RULES[name].verify, models, shape)
    assert error < 1e-12
    depth = 1 if shape.endswith("x 1") else 2
    if kind == "equal":
        assert accepted == pytest.approx(depth if shape != "the second is short" else accepted, abs=1e-9)
    assert (accepted > 0) == (kind != "disjoint")


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("kind", ["far", "near", "zeros in both"])
def test_more_worlds_of_a_larger_vocabulary_keep_the_joint_distribution(kind, seed):
    models = make_models(kind, seed, size=5, length=2)
    assert measure(SPECTR, models, "3 x 1")[0] < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_one_draft_is_verified_as_reject_verifies_it(kind):
    """The mean number of accepted tokens, by exact enumeration."""
    for shape in ("1 x 1", "1 x 2"):
        models = make_models(kind)
        assert measure(SPECTR, models, shape)[1] == pytest.approx(measure(REJECT, models, shape)[1], abs=1e-12)


def test_trees_without_replacement_are_verified_as_by_reject():
    """Guards the fallback for drafters that return ordinary trees: the same commits, uniform by uniform."""
    generator = torch.Generator().manual_seed(3)
    tokens, parents = [[0, 1, 2, 3, 1]] * 300, [[-1, 0, 0, 1, 1]] * 300
    p, q = torch.rand(2, 5 * 300, 6, generator=generator, dtype=torch.float64)
    tree = TokenTree.from_lists(tokens, parents, q / q.sum(-1, keepdim=True))
    noise = NoiseTable.from_seeds(tree, [(b, 0) for b in range(300)], [0] * 300)
    for some in (tree, replace(tree, q=None), replace(tree, num_sampled_children=(1, 2, 0, 0, 0) * 300)):
        ours, theirs = SPECTR(some, p, noise), REJECT(some, p, noise)
        assert (ours.paths, ours.tokens) == (theirs.paths, theirs.tokens)
        assert {len(path) for path in ours.paths} == {1, 2, 3}


def iterate_pairs(count: int = 300, size: int = 6) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(5)
    for i in range(count):
        p, q = np.exp((1 + i % 3) * rng.standard_normal((2, size)))
        p[rng.random(size) < 0.2] = 0
        q[rng.random(size) < 0.2] = 0
        if p.any() and q.any():
            yield p / p.sum(), q / q.sum()


@pytest.mark.parametrize("k", [1, 2, 3, 4, 8, 64])
def test_rho_is_the_root_of_its_equation(k):
    for p, q in iterate_pairs():
        rho = find_rho(p, q, k)
        assert 1 <= rho <= k
        if (p * q).any():
            beta = np.minimum(p / rho, q).sum()
            assert 1 - (1 - min(beta, 1.0)) ** k == pytest.approx(rho * beta, abs=1e-12)
            other = spectr_mutants.find_root(p, q, k)  # the root is ill-conditioned if all samples are rejected rarely
            found = [SequentialSelection(Probs(p, len(p)), Probs(q, len(q)), k, x).acceptance for x in (rho, other)]
            assert found[0] == pytest.approx(found[1], abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_acceptance_lies_between_one_sample_and_the_best_possible(k):
    """At least the overlap of p and q, at least 1 - 1/e of the bound on any selection (theorem 3 of 2310.15141), and at
    most that bound. The residual has the rest of the mass, and none where p has none."""
    gained = 0.0
    for p, q in iterate_pairs():
        selection = SequentialSelection.solve(Probs(p, len(p)), Probs(q, len(q)), k)
        overlap, bound = np.minimum(p, q).sum(), np.minimum(p, 1 - (1 - q) ** k).sum()
        assert overlap - 1e-12 <= selection.acceptance <= bound + 1e-12
        assert selection.acceptance >= (1 - 1 / math.e) * bound - 1e-12
        assert selection.residual.total == pytest.approx(1 - selection.acceptance, abs=1e-12)
        assert not selection.residual.gather(None)[p == 0].any()
        assert all(selection.get_acceptance(x) == 0 for x in np.flatnonzero((p == 0) & (q > 0)))
        gained += selection.acceptance - overlap
    assert gained == 0 if k == 1 else gained > 1


def accept_by_rounds(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """Return the probability that multi-round rejection accepts one of k independent samples of q."""
    missed = 1.0
    for _ in range(k):
        missed *= 1 - min(np.minimum(p, q).sum(), 1.0)
        left = np.maximum(p - q, 0)
        if left.sum() < 1e-14:
            return 1.0
        p = left / left.sum()
    return 1 - missed


@pytest.mark.parametrize("k", [2, 3, 8])
def test_the_selection_accepts_no_less_than_rounds_of_rejection(k):
    """An observation about random pairs, not a theorem. Enumeration of `reject` checks the formula of the rounds."""
    gains = []
    for p, q in iterate_pairs():
        selection = SequentialSelection.solve(Probs(p, len(p)), Probs(q, len(q)), k)
        gains.append(selection.acceptance - accept_by_rounds(p, q, k))
    assert min(gains) > -1e-12
    assert sum(gains) / len(gains) > 0.003
    models = make_models("far", length=2)
    shape = f"{min(k, 3)} x 1"
    by_rounds = accept_by_rounds(models.p[0], models.q[0], min(k, 3))
    assert measure(REJECT, models, shape)[1] == pytest.approx(by_rounds, abs=1e-12)


def test_sparse_and_dense_targets_give_the_same_selection():
    for p, q in iterate_pairs(50):
        ids = np.flatnonzero(p)
        dense = SequentialSelection.solve(Probs(p, len(p)), Probs(q, len(q)), 4)
        sparse = SequentialSelection.solve(Probs(p[ids], len(p), ids), Probs(q, len(q)), 4)
        assert sparse.rho == pytest.approx(dense.rho, rel=1e-12)
        assert sparse.residual.gather(None) == pytest.approx(dense.residual.gather(None), abs=1e-15)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([1 - 1e-16, 1e-16, 0.0], [1e-16, 1 - 1e-16, 0.0]),
        ([1.0, 0.0, 0.0], [5e-324, 1.0, 0.0]),
        ([5e-324, 1.0, 0.0], [1.0, 5e-324, 0.0]),
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0]),
        ([0.0, 0.0, 1.0], [0.5, 0.5, 0.0]),
    ],
)
def test_extreme_masses_give_finite_selections(p, q):
    for k in (1, 2, 5, 256):
        target = Probs(np.array(p), 3)
        selection = SequentialSelection.solve(target, Probs(np.array(q), 3), k)
        assert 1 <= selection.rho <= k
        residual = selection.residual.normalise(fallback=target)
        assert residual.total == pytest.approx(1)
        assert np.isfinite(residual.mass).all()
        assert not residual.mass[np.array(p) == 0].any()
        assert all(0 <= selection.get_acceptance(x) <= 1 for x in range(3) if q[x] > 0)


@pytest.mark.parametrize("seed", range(2))
def test_more_drafts_are_accepted_more_often(seed):
    """Means over whole steps. Multi-round rejection of the same samples lies above one draft too."""
    models = make_models("far", seed)
    found = [measure(SPECTR, models, shape)[1] for shape in ("1 x 2", "2 x 2", "3 x 2")]
    assert found[0] < found[1] < found[2]
    assert measure(REJECT, models, "3 x 2")[1] > found[0]
    assert measure(spectr_mutants.CAUTIOUS, models, "3 x 2")[1] < found[2] - 1e-3


def test_a_sample_that_no_drafter_proposes_ends_the_trials():
    """Guards tokens of probability 0 under q, rows that are no distributions, and rows of another vocabulary."""
    p, uniforms = torch.tensor([[0.4, 0.3, 0.3]] * 3, dtype=torch.float64), torch.full((1, 3), 1e-9).double()
    good = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    rows = [good[[2, 1, 0]], good * torch.nan, good - 0.5, -good, good[:2], good * 0]
    for q in rows:
        samples = {(0, 0): (SampledSiblings(q, (1, 2, 1), is_independent=True),)}
        tree = TokenTree([[0, 0, 1]], [[-1, 0, 0]], further_samples=samples)
        for rule in (SPECTR, REJECT):
            assert rule(tree, p, NoiseTable(None, uniforms, uniforms)).paths == [[0]]
    samples = {(0, 0): (SampledSiblings(good, (1, 2, 1), is_independent=True),)}
    tree = TokenTree([[0, 0, 1]], [[-1, 0, 0]], further_samples=samples)
    assert SPECTR(tree, p, NoiseTable(None, uniforms, uniforms)).paths == [[0, 1]]


# seeded faults

FAULT_WORLDS = (("3 x 1", make_models("far", 0, size=5, length=2)), ("2 x 2", make_models("far")))


def test_the_unchanged_program_the_mutants_vary_is_the_real_rule():
    for shape, models in FAULT_WORLDS:
        copy, real = measure(spectr_mutants.make_spectr_rule(), models, shape), measure(SPECTR, models, shape)
        assert copy[0] < 1e-12
        assert copy[1] == pytest.approx(real[1], abs=1e-9)
        assert measure(spectr_mutants.CAUTIOUS, models, shape)[0] < 1e-12


@pytest.mark.parametrize("name", spectr_mutants.MUTANTS)
def test_the_distribution_of_a_step_kills_a_fault_of_the_selection(name):
    errors = [measure(spectr_mutants.MUTANTS[name], models, shape)[0] for shape, models in FAULT_WORLDS]
    assert max(errors) > 1e-3
