"""Statistics of the tests: a chi-square that pools rare cells, and the distance between two distributions."""

import numpy as np
from scipy import stats
from torch import Tensor

from foredraft.verification.probs import Probs

ALPHA = 1e-6  # false alarms of one family of tests, divided among its members (Bonferroni)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Compute the p-value of counts under a distribution; zero if an impossible cell has any. Rare cells are pooled."""
    counts, probs = np.asarray(counts, float).ravel(), np.asarray(probs, float).ravel()
    if counts[probs <= 0].any():
        return 0.0
    counts, expected = counts[probs > 0], counts.sum() * probs[probs > 0] / probs.sum()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(counts) < 2:
        return 1.0
    return float(stats.chisquare(counts, expected).pvalue)


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).sum() / 2)


def sample_from_mass(probs: Tensor, u: float) -> int:
    """Sample a token from masses [V] with a uniform u, as `Probs.sample` does."""
    mass = probs.double().cpu().numpy()
    return Probs(mass, len(mass)).sample(u)
