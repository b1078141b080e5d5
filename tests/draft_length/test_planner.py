"""Plans against trying everything."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.draft_length.costs import CostCurve, DraftCost
from foredraft.draft_length.planner import LARGER_TIME_MARGIN, Planner, StepShape, cut_nodes


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


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("least", [0, 1])
def test_a_plan_stays_in_the_last_row_bucket_if_it_can(count, least):
    """Rows beyond the last graph run without one, even if the curve, which is not measured there, calls them free."""
    planner = Planner(CostCurve([(1, 1.0), (8, 1.0)], (1, 2, 4, 8)), DraftCost())
    slots, limits, rows = list(range(count)), [(least, 9)] * count, [[0.9] * 9] * count
    shape = StepShape(count, count, 0.0, least, count * least, 0.9 * count * least)
    plan = planner.find_best_plan(shape, slots, limits, rows, [[1.0] * 9] * count)
    assert count + sum(plan.nodes_by_slot.values()) == 8
    full = StepShape(9, 9, 0.0, least, count * least, 0.9 * count * least)
    assert planner.find_best_plan(full, slots, limits, rows, [[1.0] * 9] * count).longest == 9


@pytest.mark.parametrize("count", [1, 2])
def test_a_plain_step_that_was_delayed_is_not_priced_above_passes_with_drafts(count):
    """Fault: in a simulation, one slow step at the start kept drafts that lost a quarter going for 1,500 steps."""
    curve = CostCurve([(1, 1.0), (16, 1.0)])
    planner = Planner(curve, DraftCost())
    planner.plain_cost_ratio = 4.0
    arguments = list(range(count)), [(0, 4)] * count, [[0.5] * 4] * count, [[1.0] * 4] * count
    plain_rates = []
    for num_updates in (0, 8):
        for _ in range(num_updates):
            curve.update(count, count + 2, count + 2, 0, 1.0)
        plain_rates.append(planner.find_best_plan(StepShape(count, count, 0.0), *arguments).plain_rate)
    assert plain_rates[0] == pytest.approx(count / 4.0), "no larger pass is known"
    assert plain_rates[1] == pytest.approx(count / LARGER_TIME_MARGIN, rel=0.01)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ratio", [0.8, 1.5])
def test_the_price_of_plain_steps_changes_no_rate_with_drafts(count, ratio):
    """Fault: it was added to steps with drafts too, so where plain steps seemed slow, longer drafts seemed better."""
    planner = Planner(CostCurve([(1, 1.0), (16, 2.5)]), DraftCost())
    arguments = list(range(count)), [(0, 6)] * count, [[0.7**n for n in range(1, 7)]] * count, [[1.0] * 6] * count
    plan = planner.find_best_plan(StepShape(count, count, 0.0), *arguments)
    planner.plain_cost_ratio = ratio
    other = planner.find_best_plan(StepShape(count, count, 0.0), *arguments)
    assert (other.nodes_by_slot, other.rate) == (plan.nodes_by_slot, plan.rate)
    assert other.plain_rate == pytest.approx(plan.plain_rate / ratio)


def test_the_longest_drafts_are_cut_first():
    assert cut_nodes({0: 5, 1: 2, 2: 1}, 5) == {0: 2, 1: 2, 2: 1}
    assert cut_nodes({0: 5}, None) == cut_nodes({0: 5}, 5) == {0: 5}
    assert cut_nodes({0: 2, 1: 1}, 0) == {0: 0, 1: 0}


@pytest.mark.parametrize("count", [1, 2])
def test_a_plain_step_has_no_time_to_observe_and_drafts_have(count):
    """Fault: drafts were compared with plain steps that the drafter observes, so a loss of 3 % seemed a gain."""
    draft = DraftCost()
    for _ in range(60):
        draft.update(count, longest=0, nodes=0, unread=0, newcomers=0, seconds=0.1 * count, scale=1.0)
    arguments = list(range(count)), [(0, 1)] * count, [[0.5]] * count, [[1.0]] * count
    plan = Planner(CostCurve([(1, 1.0), (8, 1.0)]), draft).find_best_plan(StepShape(count, count, 0.0), *arguments)
    assert plan.plain_rate == pytest.approx(count / 1.0)
    assert plan.rate == pytest.approx(1.5 * count / (1.0 + 0.1 * count), rel=0.01)


def test_fixed_drafts_are_priced_in_steps_without_others():
    draft = DraftCost()
    draft._regression.weights = [0.0, 0.25, 0.0, 0.0, 0.0]
    shape = StepShape(1, 1, 0.0, fixed_longest=2, fixed_nodes=2, fixed_accepted=1.0)
    _, seconds = Planner(CostCurve([(1, 1.0), (8, 1.0)]), draft).estimate_baseline(shape, 1.0)
    assert seconds == pytest.approx(1.5)
