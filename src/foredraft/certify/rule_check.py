"""Check of a verification rule on random distributions, independent of the models.

Target and draft of a good pair nearly agree, and there a fault of a rule hardly shows. Here they disagree.
"""

from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np
from numpy.typing import NDArray

from foredraft.certify.draft_tree import DraftTree, Siblings
from foredraft.certify.result import CheckResult
from foredraft.certify.step_distribution import integrate_trees
from foredraft.verification.probs import Probs
from foredraft.verification.rule import Rule

Tokens = tuple[int, ...]
Shape = tuple[int, ...]  # parent of every sample; -1 for the root
VOCAB_SIZE, MAX_DEPTH = 4, 2
CHAIN, TREE, SAMPLES = (-1, 0, 1), (-1, 0, 0, 1), (-1, 0, 0, 0, 1)
SPREAD = 1.5  # standard deviation of the logits
NUM_POINTS = 1 << 15  # points of an integration, whose error is then below 8e-4
BIAS_LIMIT = 1.5e-3


def check_rule(rule: Rule) -> CheckResult:
    """Integrate steps of the rule over drafts and uniforms, for random p and q that disagree."""
    shapes = [CHAIN, TREE] if rule.takes_trees else [CHAIN]
    p, q = _make_tables()
    sets = [list(_enumerate_trees(shape, q)) for shape in shapes]
    if rule.samples_independently:
        sets.append(list(_enumerate_merged(SAMPLES, q)))
    measured = [integrate_trees(rule.verify, trees, p, NUM_POINTS) for trees in sets]
    bias, impossible = max(bias for bias, _ in measured), max(mass for _, mass in measured)
    num_trees = sum(map(len, sets))
    evidence = f"{num_trees} draft trees where p and q disagree, largest bias {bias:.2%} (limit {BIAS_LIMIT:.2%})"
    return CheckResult(
        f"rule ({rule.name})",
        bias <= BIAS_LIMIT and impossible == 0,
        evidence,
        {"bias": bias, "limit": BIAS_LIMIT, "impossible": impossible},
    )


def _make_tables() -> tuple[Mapping[Tokens, Probs], Mapping[Tokens, Probs]]:
    """Make independent random p and q after every path."""
    generator = np.random.default_rng(0)
    paths = [path for depth in range(MAX_DEPTH + 1) for path in product(range(VOCAB_SIZE), repeat=depth)]

    def make_row() -> Probs:
        mass: NDArray[np.float64] = np.exp(SPREAD * generator.standard_normal(VOCAB_SIZE))
        return Probs(mass / mass.sum(), VOCAB_SIZE)

    return {path: make_row() for path in paths}, {path: make_row() for path in paths}


def _enumerate_trees(shape: Shape, q: Mapping[Tokens, Probs]) -> Iterator[DraftTree]:
    """Enumerate the trees of a shape whose siblings are sampled without replacement."""
    for tokens in product(range(VOCAB_SIZE), repeat=len(shape) - 1):
        tree = DraftTree((0, *tokens), shape, {})
        parents = sorted(set(shape[1:]))
        children = {parent: [n for n in range(1, len(shape)) if shape[n] == parent] for parent in parents}
        if all(len({tree.tokens[n] for n in nodes}) == len(nodes) for nodes in children.values()):
            sampled = {
                parent: Siblings(q[tree.collect_path(parent)], tuple(nodes), False)
                for parent, nodes in children.items()
            }
            yield DraftTree(tree.tokens, shape, sampled)


def _enumerate_merged(shape: Shape, q: Mapping[Tokens, Probs]) -> Iterator[DraftTree]:
    """Enumerate the trees of samples with replacement: equal samples below one node share a node."""
    for samples in product(range(VOCAB_SIZE), repeat=len(shape) - 1):
        tokens, parents, node_of = [0], [-1], [0]
        children: dict[int, list[int]] = {}
        for parent, token in zip(shape[1:], samples, strict=True):
            above = node_of[parent]
            below = children.setdefault(above, [])
            node = next((child for child in below if tokens[child] == token), len(tokens))
            if node == len(tokens):
                tokens.append(token)
                parents.append(above)
            below.append(node)
            node_of.append(node)
        tree = DraftTree(tuple(tokens), tuple(parents), {})
        further = {
            parent: (Siblings(q[tree.collect_path(parent)], tuple(nodes), True),) for parent, nodes in children.items()
        }
        yield DraftTree(tree.tokens, tree.parents, {}, further)
