"""Prices against the costs that made the times, and plans against trying everything."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.draft_length.costs import CostCurve, DraftCost, Planner, StepShape


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


def find_best_rate(planner: Planner, scene: StepShape, gains: list[list[float]], draft: float) -> float:
    """Find the best rate over every assignment of prefixes, by enumeration."""
    best = 0.0
    for sizes in itertools.product(*[range(len(row) + 1) for row in gains]):
        if any(sizes):
            won = sum(sum(row[:n]) for row, n in zip(gains, sizes, strict=True))
            seconds = planner.estimate_verify_time(scene, sum(sizes)) + draft * max(sizes)
            best = max(best, (scene.num_requests + won) / seconds)
    return best


@pytest.mark.parametrize("count", [1, 2, 3])
@given(data=st.data())
def test_a_plan_is_the_best_of_all(count, data):
    steps = data.draw(st.lists(st.floats(0.0, 1.0), min_size=16, max_size=16))
    points = [(i + 1, 1.0 + sum(steps[: i + 1])) for i in range(16)]
    draft, per_level = DraftCost(), data.draw(st.floats(0.0, 0.5))
    draft._regression.weights = [0.0, per_level, 0.0, 0.0, 0.0]
    planner = Planner(CostCurve(points), draft)
    falling = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3).map(lambda row: sorted(row, reverse=True))
    gains = [data.draw(falling) for _ in range(count)]
    scene = StepShape(count, count, 0.0)
    plan = planner.find_best_plan(scene, list(range(count)), [(0, 3)] * count, gains, [[1.0] * 3] * count)
    assert plan.rate == pytest.approx(find_best_rate(planner, scene, gains, per_level), rel=1e-6)
    assert plan.plain_rate == pytest.approx(count / points[count - 1][1])


def test_a_plan_looks_over_the_edge_of_a_shelf():
    """The second shelf pays although its first node does not."""
    points = [(1, 1.0), (2, 1.5), (9, 1.5)]
    plan = Planner(CostCurve(points), DraftCost()).find_best_plan(
        StepShape(1, 1, 0.0), [0], [(0, 8)], [[0.4] * 8], [[1.0] * 8]
    )
    assert plan.nodes_by_slot == {0: 8}
    assert plan.speedup > 2.0


def test_rare_drafts_are_priced_whole():
    """Nodes drafted in one step of ten cost a tenth of an expensive shelf, not a cheap shelf that their mean fits."""
    curve = CostCurve([(1, 1.0), (4, 1.0), (5, 9.0), (64, 9.0)])
    plan = Planner(curve, DraftCost()).find_best_plan(
        StepShape(2, 2, 0.0), [0, 1], [(0, 8)] * 2, [[0.08] * 2 + [0.01] * 6] * 2, [[0.1] * 8] * 2
    )
    assert plan.longest <= 2
