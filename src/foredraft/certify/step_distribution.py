"""The distribution of the tokens of one step, integrated over its uniform random numbers.

A lossless rule has one property at every draft node: given that a step continues beyond the tokens s on the path to
the node, its next token has the distribution p after s. It follows from the chain rule, because a step that ends at s
continues by plain decoding. So no probabilities are needed beyond those of the drafted paths.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foredraft.certify.draft_tree import DraftTree
from foredraft.verification.noise import NoiseTable
from foredraft.verification.probs import Probs
from foredraft.verification.rule import VerifyFunction

Tokens = tuple[int, ...]
MIN_POINTS = 64  # of a tree
Continuations = Mapping[Tokens, Mapping[int, float]]  # tokens s of a path -> next token -> probability


@dataclass(frozen=True)
class RepeatedProbs:
    """p of one tree that a step holds many times: row r is that of node r mod N."""

    rows: tuple[Probs, ...]  # N

    def get_probs(self, row: int) -> Probs:
        """Return p of a row."""
        return self.rows[row % len(self.rows)]

    def sample_tokens(self, rows: Sequence[int], key: object) -> list[int]:
        """Raise TypeError: rules with keyed samples are not integrated over uniforms."""
        raise TypeError("a rule that samples with noise keys has no uniforms to integrate over")

    def select(self, rows: Sequence[int]) -> "RepeatedProbs":
        """Return the probabilities of these rows, in the given order."""
        return RepeatedProbs(tuple(self.get_probs(row) for row in rows))


def make_stratified_points(num_points: int, num_dimensions: int, seed: int) -> Tensor:
    """Return points [M, D] that fill the unit cube evenly: a scrambled Sobol sequence.

    The mean over them of a function that is constant on few boxes differs from its integral by about 1/M, not by the
    1/sqrt(M) of random points.

    Args:
        num_points: M, a power of two.
        num_dimensions: D.
        seed: seed of the scrambling.
    """
    engine = torch.quasirandom.SobolEngine(num_dimensions, scramble=True, seed=seed)  # type: ignore[no-untyped-call]
    return engine.draw(num_points, dtype=torch.float64).clamp(2.0**-53, 1 - 2.0**-53)


def integrate_step(
    verify: VerifyFunction, tree: DraftTree, probs: Mapping[Tokens, Probs], num_points: int, seed: int = 0
) -> Continuations:
    """Integrate the outcome of a verification over its uniforms.

    Args:
        verify: function of the rule.
        tree: draft tree.
        probs: p after every path of draft tokens of the tree.
        num_points: points of the integration.
        seed: seed of the points. Default 0.

    Returns:
        For every path s the probability that the committed tokens begin with s and go on with each token. Token ids of
        the vocabulary.
    """
    size = len(tree.tokens)
    rows = [probs[tree.collect_path(node)] for node in range(size)]
    ids = _list_ids(tree, rows)
    p = tuple(Probs(row.gather(np.array(ids)), len(ids)) for row in rows)
    points = make_stratified_points(num_points, size, seed)  # draft nodes, then the sample
    accept = torch.cat([torch.full((num_points, 1), 0.5, dtype=torch.float64), points[:, : size - 1]], 1)
    noise = NoiseTable(None, accept, points[:, -1:].expand(num_points, size))
    commit = verify(tree.repeat(num_points, ids), RepeatedProbs(p), noise)
    outcomes = Counter(map(tuple, commit.tokens))
    result: dict[Tokens, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for outcome, count in outcomes.items():
        tokens = tuple(ids[index] for index in outcome)
        for depth, token in enumerate(tokens):
            result[tokens[:depth]][token] += count / num_points
    return result


def _list_ids(tree: DraftTree, rows: Sequence[Probs]) -> list[int]:
    """List the tokens that a verification of this tree can read or emit, ascending."""
    ids = tree.list_tokens()
    for row in rows:
        ids |= set(map(int, np.flatnonzero(row.gather(None)) if row.ids is None else row.ids))
    return sorted(ids)


def integrate_trees(
    verify: VerifyFunction, trees: Sequence[DraftTree], probs: Mapping[Tokens, Probs], num_points: int
) -> tuple[float, float]:
    """Integrate a step over its drafts and its uniforms, and compare it with the target's distribution.

    Args:
        verify: function of the rule.
        trees: all draft trees that the drafter can make here, weighted by their probabilities.
        probs: p after every path of draft tokens.
        num_points: points of the integration, divided among the trees by their probabilities.

    Returns:
        (bias, impossible): the largest total variation distance among the depths, and the probability of tokens that
        the target cannot produce.
    """
    weights = np.array([tree.probability for tree in trees])
    weights /= weights.sum()
    found: dict[Tokens, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for seed, (tree, weight) in enumerate(zip(trees, weights, strict=True)):
        count = max(MIN_POINTS, 2 ** math.ceil(math.log2(num_points * weight)))
        for path, mass_by_token in integrate_step(verify, tree, probs, count, seed).items():
            for token, mass in mass_by_token.items():
                found[path][token] += float(weight) * mass
    return measure_bias(found, probs)


def measure_bias(found: Continuations, probs: Mapping[Tokens, Probs]) -> tuple[float, float]:
    """Compare continuations with the target's distribution.

    Args:
        found: probabilities of continuations, from `integrate_step`.
        probs: p after every path.

    Returns:
        (bias, impossible): the largest total variation distance among the depths, and the probability of tokens that
        the target cannot produce.
    """
    by_depth: dict[int, float] = defaultdict(float)
    impossible = 0.0
    for path, mass_by_token in found.items():
        p, total = probs[path], sum(mass_by_token.values())
        support = p.ids if p.ids is not None else np.flatnonzero(p.mass)
        expected = {int(token): p[int(token)] / p.total * total for token in support}
        tokens = {*expected, *mass_by_token}
        differences = [abs(mass_by_token.get(token, 0.0) - expected.get(token, 0.0)) for token in tokens]
        by_depth[len(path)] += sum(differences) / 2
        impossible += sum(mass for token, mass in mass_by_token.items() if not p[token] > 0)
    return max(by_depth.values(), default=0.0), impossible
