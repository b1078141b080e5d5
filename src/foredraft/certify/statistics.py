"""Tests of counts against probabilities, and what such a test can detect."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MIN_EXPECTED = 5.0  # cells with a smaller expected count are pooled
POWER = 0.99  # probability with which a bias of the stated size is found


@dataclass(frozen=True)
class ChiSquare:
    """Result of a chi-square test."""

    statistic: float  # infinite if an impossible cell has a count
    degrees: int  # of freedom
    num_samples: int

    @property
    def p_value(self) -> float:
        """Probability of so large a statistic if the counts have the given probabilities."""
        if self.statistic == math.inf:
            return 0.0
        return compute_chi_square_tail(self.statistic, self.degrees) if self.degrees > 0 else 1.0

    def __add__(self, other: "ChiSquare") -> "ChiSquare":
        """Join two independent tests."""
        return ChiSquare(
            self.statistic + other.statistic, self.degrees + other.degrees, self.num_samples + other.num_samples
        )

    def find_detectable_bias(self, alpha: float) -> float:
        """Return the least total variation distance that the test would find with a probability of 99 %.

        It is that of the bias that the test detects least: probability moved between two halves of every distribution.
        The test rejects at a p-value below `alpha`. 1 if there are too few samples to find any.
        """
        if self.degrees < 1 or not self.num_samples:
            return 1.0
        bound = invert(lambda x: compute_chi_square_tail(x, self.degrees) < alpha, 0.0, 1e4)
        strength = invert(lambda s: compute_noncentral_tail(bound, self.degrees, s) > POWER, 0.0, 1e4)
        return min(1.0, math.sqrt(strength / (4 * self.num_samples)))


NO_TEST = ChiSquare(0.0, 0, 0)


def compare_counts(counts: Sequence[float] | Floats, probs: Sequence[float] | Floats) -> ChiSquare:
    """Test counts of cells against their probabilities, which need not sum to exactly 1."""
    observed, p = np.asarray(counts, float), np.asarray(probs, float)
    num_samples = int(observed.sum())
    if observed[p <= 0].any():
        return ChiSquare(math.inf, len(p) - 1, num_samples)
    observed, expected = observed[p > 0], observed.sum() * p[p > 0] / p.sum()
    rare = expected < MIN_EXPECTED
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(observed) < 2:
        return NO_TEST
    return ChiSquare(float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1, num_samples)


def compute_chi_square_tail(x: float, degrees: float) -> float:
    """Return the probability that a chi-square variable exceeds x."""
    half, at = torch.tensor(degrees / 2, dtype=torch.float64), torch.tensor(x / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, at))


def compute_noncentral_tail(x: float, degrees: float, strength: float) -> float:
    """Return the probability that a noncentral chi-square variable exceeds x: a Poisson mixture of central ones."""
    mean = strength / 2
    counts = torch.arange(int(mean + 12 * math.sqrt(mean + 1) + 20), dtype=torch.float64)
    log_weights = counts * math.log(mean) - mean - torch.lgamma(counts + 1) if mean > 0 else None
    weights = (counts == 0).double() if log_weights is None else log_weights.exp()
    tails = torch.special.gammaincc(degrees / 2 + counts, torch.full_like(counts, x / 2))
    return float((weights * tails).sum())


def invert(is_above: Callable[[float], bool], low: float, high: float, steps: int = 60) -> float:
    """Return where a monotone condition becomes true, by bisection."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high
