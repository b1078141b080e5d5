"""The rule of SpecTr (2310.15141): k-sequential selection among independent samples of one draft distribution.

docs/design.md ("Selection among independent samples") has the proof. The rule takes every tree. Where the samples below
a node are not independent, it is `reject`: k-sequential selection with k = 1.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor

from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import Noise
from foredraft.verification.paths import verify_by_level
from foredraft.verification.probs import Floats, Probs, TargetProbs, to_target_probs
from foredraft.verification.rule import Rule
from foredraft.verification.siblings import iterate_trials

ROOT_TOLERANCE = 1e-14  # relative; the rule is lossless for every rho that is not below the root


@dataclass(frozen=True, eq=False)
class SequentialSelection:
    """K-sequential selection of one token of r among k independent samples of q.

    The samples are tried in the order of sampling. x is accepted with probability min(1, r(x) / (rho q(x))).
    """

    r: Probs  # [number of ids] normalised target
    q: Probs  # [V] normalised
    num_samples: int  # k
    rho: float  # in [1, k]

    @classmethod
    def solve(cls, r: Probs, q: Probs, num_samples: int) -> "SequentialSelection":
        """Return the selection with the smallest lossless rho, which accepts most often."""
        return cls(r, q, num_samples, find_rho(r.mass, q.gather(r.ids), num_samples))

    def get_acceptance(self, x: int) -> float:
        """Return the probability with which one sample x is accepted; 0 if r(x) = 0."""
        return min(1.0, self.r[x] / (self.rho * self.q[x]))

    @cached_property
    def _trial_mass(self) -> Floats:
        """[number of ids] probability that one trial accepts each token; their sum is beta(rho)."""
        mass: Floats = np.minimum(self.r.mass / self.rho, self.q.gather(self.r.ids))
        return mass

    @property
    def acceptance(self) -> float:
        """Probability that one of the k samples is accepted."""
        return _combine_trials(float(self._trial_mass.sum()), self.num_samples)

    @property
    def residual(self) -> Probs:
        """Distribution of the token if no sample is accepted, not normalised: its sum is 1 - `acceptance`."""
        beta = float(self._trial_mass.sum())
        expected_trials = _combine_trials(beta, self.num_samples) / beta if beta > 0 else 1.0
        mass = self.r.mass - expected_trials * self._trial_mass
        return Probs(np.maximum(mass, 0, out=mass), self.r.vocab_size, self.r.ids)


def find_rho(r: Floats, q: Floats, num_samples: int) -> float:
    """Return the root rho in [1, k] of 1 - (1 - beta(rho))^k = rho beta(rho), with beta(rho) = sum of min(r / rho, q).

    The left side falls with rho, and the right side rises. Bisection returns the upper end, at which no token is
    accepted too often. Tokens whose r / q lies outside the interval are summed once.

    Args:
        r: [n] masses of the target.
        q: [n] masses of the same tokens.
        num_samples: k.
    """
    low, high = 1.0, float(num_samples)
    r_sum = q_sum = 0.0  # of tokens whose minimum is r, or q, at every rho of the interval
    while high - low > ROOT_TOLERANCE * high:
        middle = (low + high) / 2
        accepted = r_sum + middle * q_sum  # rho * beta(rho)
        if len(r):
            is_r = r <= low * q
            is_q = ~is_r & (r >= high * q)
            is_open = ~(is_r | is_q)
            r_sum += float(r[is_r].sum())
            q_sum += float(q[is_q].sum())
            r, q = r[is_open], q[is_open]
            accepted = r_sum + middle * q_sum + float(np.minimum(r, middle * q).sum())
        if accepted < _combine_trials(accepted / middle, num_samples):
            low = middle
        else:
            high = middle
    return high


def _combine_trials(beta: float, num_samples: int) -> float:
    """Return 1 - (1 - beta)^k, exact for a small beta too."""
    if num_samples == 1:  # the residual is then that of `reject` to the last bit
        return beta
    return -math.expm1(num_samples * math.log1p(-beta)) if beta < 1 else 1.0


def spectr(tree: TokenTree, p: Tensor | TargetProbs, noise: Noise) -> Commit:
    """SpecTr: select a token of p among the independent samples below each node, and continue with those equal to it.

    A token that was sampled several times has several trials, in the order of sampling. They share the uniform of its
    node: given that it exceeds the probability of acceptance so far, it is uniform on the rest of the interval.

    Reference: 2310.15141, K-SEQ.
    """

    def select_child(b: int, node: int, r: Probs) -> tuple[int | None, Probs]:
        tried: dict[int, float] = {}  # child -> probability that one of its trials so far accepts it
        for q, samples in iterate_trials(tree, b, node, r.vocab_size):
            selection = SequentialSelection.solve(r, q, len(samples))
            for child, x in samples:
                before = tried.get(child, 0.0)
                tried[child] = before + (1 - before) * selection.get_acceptance(x)
                if noise.accept_uniform(b, child) < tried[child]:
                    return child, r
            r = selection.residual.normalise(fallback=r)  # only rounding can leave a residual without mass
        return None, r

    return verify_by_level(tree, to_target_probs(p), noise, select_child)


SPECTR = Rule(
    "spectr",
    spectr,
    takes_trees=True,
    uses_q=True,
    shares_noise=False,
    is_lossless=True,
    is_reproducible=False,
    samples_independently=True,
)
