"""Check of extreme random numbers: no token of probability zero is ever committed, and no uniform is 0 or 1.

Statistics cannot see such faults: they occur once in 2^52 random numbers.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import torch

from foredraft.certify.draft_tree import DraftTree, Siblings
from foredraft.certify.result import CheckResult
from foredraft.certify.step_distribution import RepeatedProbs
from foredraft.sampling import rng
from foredraft.verification.noise import NoiseTable
from foredraft.verification.probs import Probs
from foredraft.verification.rule import Rule

MASK = (1 << 64) - 1
TINY = 5e-324  # smallest positive number: its product with a probability is 0
UNIFORMS = (TINY, 2.0**-53, 0.5, 1 - 2.0**-53)
EXTREME_BITS = (0, 1, MASK, MASK - 1, 1 << 63, 1 << 12, (1 << 12) - 1)
VOCAB_SIZE = 6
_EVEN = (0.25, 0.25, 0.25, 0.25, 0.0, 0.0)
# p of every node, and q of every parent; the draft tokens are 1, 2 and 3
_PAIRS: dict[str, tuple[tuple[float, ...], tuple[float, ...] | None]] = {
    "draft token impossible": ((0.5, 0.0, 0.0, 0.0, 0.5, 0.0), _EVEN),
    "draft token impossible, deterministic": ((0.5, 0.0, 0.0, 0.0, 0.5, 0.0), None),
    "draft token impossible and unlikely": ((0.5, 0.0, 0.0, 0.0, 0.5, 0.0), (1 - 3 * TINY, TINY, TINY, TINY, 0.0, 0.0)),
    "p = q": (_EVEN, _EVEN),
    "p = q but for rounding": (_EVEN, (0.25 + 2**-54, 0.25, 0.25, 0.25 - 2**-54, 0.0, 0.0)),
    "one token possible": ((0.0, 1.0, 0.0, 0.0, 0.0, 0.0), _EVEN),
    "no common token": ((0.0, 0.0, 0.0, 0.0, 0.5, 0.5), _EVEN),
    "the last id": ((0.0, 0.0, 0.0, 0.0, 0.0, 1.0), _EVEN),
}
_SHAPES = {"chain": (-1, 0, 1, 2), "siblings": (-1, 0, 0, 0)}


def check_extremes(rule: Rule) -> CheckResult:
    """Run a rule on extreme uniforms, and the generator of random numbers on extreme states."""
    faults = list(_find_impossible_tokens(rule)) if rule.uses_q else []
    faults += _find_extreme_uniforms()
    evidence = (
        f"{len(_PAIRS)} pairs of p and q at {len(UNIFORMS)} uniforms, {len(EXTREME_BITS)} states of the generator"
    )
    evidence += f"; {len(faults)} faults, the first: {faults[0]}" if faults else "; no impossible token"
    return CheckResult(f"extreme random numbers ({rule.name})", not faults, evidence, {"faults": faults})


def _find_impossible_tokens(rule: Rule) -> Iterator[str]:
    """Report tokens of probability 0 that the rule commits, and requests left without a token."""
    choices = list(product(UNIFORMS, repeat=4))
    for (pair, (p, q)), (shape, parents) in product(_PAIRS.items(), _SHAPES.items()):
        if shape != "chain" and not rule.takes_trees:
            continue
        tree = _make_tree(parents, q)
        accept = torch.tensor([[0.5, *some[:3]] for some in choices], dtype=torch.float64)
        sample = torch.tensor([[some[3]] * 4 for some in choices], dtype=torch.float64)
        rows = RepeatedProbs((Probs(np.array(p), VOCAB_SIZE),) * 4)
        commit = rule.verify(tree.repeat(len(choices), range(VOCAB_SIZE)), rows, NoiseTable(None, accept, sample))
        for uniforms, tokens in zip(choices, commit.tokens, strict=True):
            if not tokens or any(p[token] <= 0 for token in tokens):
                yield f"{tokens} where {pair} ({shape}), at {uniforms}"


def _make_tree(parents: tuple[int, ...], q: tuple[float, ...] | None) -> DraftTree:
    sampled: dict[int, Siblings] = {}
    if q is not None:
        probs = Probs(np.array(q), VOCAB_SIZE)
        for parent in sorted(set(parents[1:])):
            children = tuple(node for node in range(1, len(parents)) if parents[node] == parent)
            sampled[parent] = Siblings(probs, children, False)
    return DraftTree((0, 1, 2, 3), parents, sampled)


def _find_extreme_uniforms() -> list[str]:
    """Report states of the generator at which a uniform is not strictly between 0 and 1."""
    keys = torch.tensor([to_signed(find_state(bits)) for bits in EXTREME_BITS])
    values = rng.uniform_matrix(keys, 1)[:, 0].tolist()
    return [f"uniform {u} of the bits {bits:#x}" for bits, u in zip(EXTREME_BITS, values, strict=True) if not 0 < u < 1]


def find_state(bits: int) -> int:
    """Find the key whose first uniform has these 64 bits: the inverse of SplitMix64's finaliser."""
    value = _unshift(bits, 31)
    value = _unshift(value * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK, 27)
    value = _unshift(value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK, 30)
    return (value - 0x9E3779B97F4A7C15) & MASK


def _unshift(y: int, shift: int) -> int:
    x = y
    for _ in range(64 // shift):
        x = y ^ (x >> shift)
    return x


def to_signed(value: int) -> int:
    """Return the signed 64-bit integer with the bits of an unsigned one."""
    return value - (1 << 64) if value >> 63 else value
