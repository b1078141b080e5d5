"""The tests of counts: p-values and power equal scipy's, and the stated strength is what simulation finds."""

import numpy as np
import pytest
from scipy import stats

from foredraft.certify.statistics import (
    NO_TEST,
    ChiSquare,
    compare_counts,
    compute_chi_square_tail,
    compute_noncentral_tail,
)


@pytest.mark.parametrize(("x", "degrees"), [(0.5, 1), (8.0, 8), (30.0, 8), (90.0, 26)])
def test_tails_equal_those_of_scipy(x, degrees):
    assert compute_chi_square_tail(x, degrees) == pytest.approx(stats.chi2.sf(x, degrees), rel=1e-9)
    for strength in (0.0, 3.0, 75.0):
        expected = stats.ncx2.sf(x, degrees, strength) if strength else stats.chi2.sf(x, degrees)
        assert compute_noncentral_tail(x, degrees, strength) == pytest.approx(expected, rel=1e-6)


def test_counts_are_compared_as_by_scipy():
    counts, probs = [18, 55, 27], [0.2, 0.5, 0.3]
    expected = stats.chisquare(counts, np.array(probs) * 100).pvalue
    assert compare_counts(counts, probs).p_value == pytest.approx(expected, rel=1e-9)


def test_an_impossible_cell_fails_and_rare_cells_are_pooled():
    assert compare_counts([5, 1], [1.0, 0.0]).p_value == 0
    assert compare_counts([50, 48, 1, 1], [0.5, 0.48, 0.01, 0.01]).degrees == 2


def test_joined_tests_add_up():
    one = ChiSquare(3.0, 2, 100)
    assert sum([one, one], NO_TEST) == ChiSquare(6.0, 4, 200)


def test_the_stated_bias_is_found_in_99_of_100_simulations():
    generator, alpha, count = np.random.default_rng(0), 1e-3, 2000
    p = np.full(6, 1 / 6)
    bias = compare_counts(generator.multinomial(count, p), p).find_detectable_bias(alpha)
    biased = p + np.array([1, 1, 1, -1, -1, -1]) * bias / 3
    found = [compare_counts(generator.multinomial(count, biased), p).p_value < alpha for _ in range(2000)]
    assert 0.98 < np.mean(found) < 0.998
    half = p + np.array([1, 1, 1, -1, -1, -1]) * bias / 6
    assert np.mean([compare_counts(generator.multinomial(count, half), p).p_value < alpha for _ in range(500)]) < 0.5


def test_no_samples_detect_nothing():
    assert NO_TEST.find_detectable_bias(1e-6) == 1.0
