"""Prices against the costs that made the times."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.draft_length.costs import CostCurve, DraftCost


def test_the_curve_is_straight_between_points_and_goes_on_above():
    curve = CostCurve([(1, 1.0), (8, 1.0), (9, 2.0), (16, 2.0), (32, 4.0)])
    assert [curve.interpolate(rows) for rows in (0, 1, 4, 8, 9, 16, 24, 32, 64)] == [1, 1, 1, 1, 2, 2, 3, 4, 8]


def test_points_must_rise():
    with pytest.raises(ValueError, match="rising"):
        CostCurve([(4, 1.0), (2, 1.0)])


def test_one_point_is_a_flat_curve():
    assert CostCurve([(1, 0.5)]).interpolate(100) == 0.5


@pytest.mark.parametrize("has_points", [True, False])
def test_what_requests_and_scored_rows_cost_is_learnt(has_points):
    curve, dice = CostCurve([(1, 1.0), (64, 1.0)] if has_points else ()), random.Random(0)
    for _ in range(400):
        requests, nodes = dice.randint(1, 8), dice.randint(0, 4)
        rows = requests + nodes * requests
        curve.update(requests, rows, rows, 100 * rows, (1.0 + 0.05 * requests + 0.02 * rows) * dice.gauss(1, 0.01))
    for requests, rows in ((1, 1), (1, 5), (8, 8), (8, 40)):
        wanted = 1.0 + 0.05 * requests + 0.02 * rows
        assert curve.predict(requests, rows, rows, 100 * rows) == pytest.approx(wanted, rel=0.05)


def test_a_slower_machine_is_a_slower_curve_and_not_a_dearer_row():
    curve = CostCurve([(1, 1.0), (16, 1.3)])
    for _ in range(300):
        curve.update(1, 5, 5, 500, 2 * curve.interpolate(5))
    assert curve.predict(1, 1, 1, 100) == pytest.approx(2.0, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9), st.floats(1e-5, 1e3)), max_size=40))
def test_no_coefficient_is_negative(steps):
    curve, draft = CostCurve(), DraftCost()
    for requests, nodes, seconds in steps:
        curve.update(requests, requests + nodes, requests + nodes, 10 * nodes, seconds)
        draft.update(requests, min(nodes, 3), nodes, nodes // 2, nodes // 4, seconds, 1.0)
    assert min(curve._regression.weights) >= 0.0
    assert min(*draft._regression.weights, *draft._idle_regression.weights) >= 0.0


def test_a_pause_leaves_the_price_as_it_was():
    curve, draft = CostCurve([(1, 1.0), (16, 1.0)]), DraftCost()
    for _ in range(100):
        curve.update(1, 4, 4, 0, 1.0)
        draft.update(1, 3, 3, 0, 0, 0.3, 1.0)
    curve.update(1, 4, 4, 0, 10.0)
    draft.update(1, 3, 3, 0, 0, 3.0, 1.0)
    assert curve.predict(1, 4, 4, 0) == pytest.approx(1.0, rel=0.05)
    assert draft.predict(1, 3, 3) == pytest.approx(0.3, rel=0.1)


def test_a_lasting_change_is_believed():
    curve = CostCurve([(1, 1.0), (16, 1.0)])
    for _ in range(100):
        curve.update(1, 4, 4, 0, 1.0)
    for _ in range(300):
        curve.update(1, 4, 4, 0, 2.0)
    assert curve.predict(1, 4, 4, 0) == pytest.approx(2.0, rel=0.1)


def test_reading_is_no_part_of_the_price_of_a_draft():
    draft = DraftCost()
    draft.update(1, 3, 3, 0, 1, 5.0, 1.0)  # the prompt
    for turn in range(60):
        unread = 50 if turn % 6 == 0 else 0
        draft.update(1, 3, 3, unread, 0, 0.3 + 0.01 * unread, 1.0)
    assert draft.predict(1, 3, 3) == pytest.approx(0.3, rel=0.15)
    assert draft.predict(1, 3, 3, unread=100) == pytest.approx(1.3, rel=0.2)
    assert draft.predict(1, 3, 3, newcomers=1) == pytest.approx(5.0, rel=0.3)


def test_following_costs_whether_or_not_anyone_drafts():
    draft = DraftCost()
    for _ in range(50):
        draft.update(4, 0, 0, 0, 0, 0.4, 1.0)
        draft.update(4, 2, 8, 0, 0, 0.7, 1.0)
    assert draft.predict(4, 0, 0) == pytest.approx(0.4)
    assert draft.predict(4, 2, 8) == pytest.approx(0.7, rel=0.02)


BUCKETS = (1, 2, 4, 8, 16)


def test_a_pass_costs_what_its_bucket_costs():
    curve = CostCurve([(1, 1.0), (2, 1.1), (4, 1.2), (8, 2.0), (16, 3.0)], BUCKETS)
    sizes = [1, 2, 3, 4, 5, 8, 8.0000001, 9, 16]
    expected = [1.0, 1.1, 1.2, 1.2, 2.0, 2.0, 2.0, 3.0, 3.0]
    assert [curve.interpolate(rows) for rows in sizes] == expected
    none = np.zeros(len(sizes))
    assert curve.predict_many(1, np.array(sizes), none, none).tolist() == expected
    assert curve.interpolate(24) == pytest.approx(4.0), "beyond the last bucket a pass costs what its tokens cost"
    assert [curve.count_free_rows(rows) for rows in (1, 16, 17)] == [15, 0, None]
    assert CostCurve([(1, 1.0), (8, 8.0)]).count_free_rows(3) is None


def test_the_costs_of_buckets_are_learnt_without_a_measured_curve():
    curve, dice = CostCurve((), BUCKETS), random.Random(0)
    for _ in range(200):
        rows = dice.randint(1, 16)
        curve.update(1, rows, 1, 0, 1.0 + 0.1 * curve.pad(rows))
    assert [curve.predict(1, rows, 1, 0) for rows in (5, 8, 9)] == pytest.approx([1.8, 1.8, 2.6], rel=0.03)


def test_buckets_must_rise():
    with pytest.raises(ValueError, match="buckets of a cost curve must rise"):
        CostCurve((), (4, 2))
