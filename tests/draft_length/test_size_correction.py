"""Corrections of predicted times by size."""

import numpy as np
import pytest

from foredraft.draft_length.size_correction import NUM_EAGER_UPDATES, REBUILD_INTERVAL, SizeCorrection


def test_a_size_that_occurred_has_its_ratio_and_others_lie_between():
    correction = SizeCorrection()
    assert correction.estimate(5) == 1.0
    for _ in range(60):
        correction.update(4, 1.0)
        correction.update(8, 2.0)
    sizes = [1, 4, 6, 8, 100]
    expected = pytest.approx([1.0, 1.0, 1.5, 2.0, 2.0], rel=0.05)
    assert [correction.estimate(size) for size in sizes] == expected
    assert correction.estimate_many(np.array(sizes, dtype=float)) == expected


def test_confidence_grows_with_visits_and_fades():
    correction = SizeCorrection()
    assert correction.get_confidence(4) == 0.0
    grown = []
    for _ in range(8):
        correction.update(4, 1.5)
        grown.append(correction.get_confidence(4))
    assert grown == sorted(grown)
    assert grown[-1] > 0.7
    before = correction.estimate(4)
    for _ in range(3000):
        correction.update(8, 1.0)
    assert before > 1.4
    assert correction.get_confidence(4) == 0.0, "it is dropped"


def test_large_sizes_share_their_ratio_with_near_ones():
    correction = SizeCorrection()
    for size in range(500, 520):
        correction.update(size, 2.0)
    assert len(correction._means) <= 2
    assert correction.estimate(510) > 1.8


def test_relative_ratios_leave_the_level_to_the_curve():
    correction = SizeCorrection(is_relative=True)
    for _ in range(60):
        correction.update(4, 1.0)
        correction.update(8, 2.0)
    assert correction.estimate(8) / correction.estimate(4) == pytest.approx(2.0, rel=0.05)
    assert correction.estimate(8) * correction.estimate(4) == pytest.approx(1.0, rel=0.05)


def test_a_rare_ratio_counts_at_once_if_it_has_to():
    correction = SizeCorrection()
    for _ in range(NUM_EAGER_UPDATES + REBUILD_INTERVAL):
        correction.update(4, 1.0)
    correction.update(1, 2.0)
    assert correction.estimate(1) == pytest.approx(1.0)
    correction.update(1, 2.0, counts_at_once=True)
    assert correction.estimate(1) > 1.5
