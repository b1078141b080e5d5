"""Estimates against the chances that made the outcomes."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.draft_length.acceptance import SurvivalEstimator


def chain(survival: SurvivalEstimator, slot: int, chance: float, budget: int, drafts: int, seed: int = 0) -> None:
    dice = random.Random(seed)
    for _ in range(drafts):
        kept = 0
        while kept < budget and dice.random() < chance:
            kept += 1
        survival.record_draft(slot, budget, budget, tuple(range(1, kept + 1)))


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_a_chain_is_estimated_by_depth(chance):
    survival = SurvivalEstimator()
    chain(survival, 0, chance, 4, 400)
    found = survival.estimate_survival([0], 4)[0]
    assert found == pytest.approx([chance**j for j in range(1, 5)], abs=0.12)
    assert not survival.is_tree


def test_a_window_that_was_kept_whole_speaks_for_a_longer_one():
    survival = SurvivalEstimator()
    chain(survival, 0, 1.0, 2, 50)
    assert survival.estimate_survival([0], 6)[0][5] > 0.75


def test_what_lies_beyond_the_window_follows_the_last_node():
    survival = SurvivalEstimator()
    chain(survival, 0, 0.5, 3, 400)
    gains = survival.estimate_survival([0], 5)[0]
    assert gains[4] / gains[3] == pytest.approx(gains[2] / gains[1], abs=0.05)


def test_requests_differ_and_a_new_one_starts_from_what_they_share():
    survival = SurvivalEstimator()
    for turn in range(100):
        chain(survival, 0, 0.95, 3, 1, turn)
        chain(survival, 1, 0.1, 3, 1, 1000 + turn)
    good, new, bad = (gains[0] for gains in survival.estimate_survival([0, 9, 1], 3))
    assert good > 0.8 > new > 0.3 > bad


def test_the_first_outcomes_of_a_request_weigh_little():
    survival = SurvivalEstimator()
    chain(survival, 0, 0.8, 1, 300)
    survival.record_draft(1, 1, 1, ())
    assert survival.estimate_survival([1], 1)[0][0] > 0.6


def test_a_tree_is_estimated_by_node():
    survival, dice = SurvivalEstimator(), random.Random(0)
    for _ in range(600):  # two siblings, then a child of the second
        which = dice.random()
        survival.record_draft(0, 3, 3, (1,) if which < 0.5 else (2, 3) if which < 0.8 else ())
    assert survival.is_tree
    gains = survival.estimate_survival([0], 3)[0]
    assert gains == pytest.approx([0.5, 0.3, 0.3], abs=0.1)


def test_rejected_drafts_count_after_the_first_accepted_sibling():
    """Until a sibling is accepted, trees look like chains. The rejections before that still count."""
    survival = SurvivalEstimator()
    for slot in (0, 1):
        survival.register(slot, slot)
        chain(survival, slot, 0.05, 8, 100, seed=slot)
    survival.record_draft(0, 8, 8, (2,))
    assert survival.is_tree
    for slot in (0, 1):
        assert sum(survival.estimate_survival([slot], 16)[0]) < 1.0


def test_a_node_that_is_better_than_those_before_it_lends_them_its_worth():
    survival = SurvivalEstimator()
    for _ in range(300):
        survival.record_draft(0, 3, 3, (2, 3))
    gains = survival.estimate_survival([0], 3)[0]
    assert gains[0] == gains[1] == gains[2] == pytest.approx(2 / 3, abs=0.05)


def test_a_drafter_that_often_has_nothing_wins_little_and_costs_little():
    survival, dice = SurvivalEstimator(), random.Random(0)
    for _ in range(500):
        has_draft = dice.random() < 0.2
        survival.record_draft(0, 4, 4 if has_draft else 0, (1, 2, 3, 4) if has_draft else ())
    assert survival.estimate_survival([0], 4)[0] == pytest.approx([0.2] * 4, abs=0.1)
    assert survival.estimate_draft_probs([0], 4)[0] == pytest.approx([0.2] * 4, abs=0.1)


def test_rows_are_certain_until_a_draft_was_short():
    survival = SurvivalEstimator()
    chain(survival, 0, 0.5, 3, 10)
    assert survival.estimate_draft_probs([0], 5) == [[1.0] * 5]


def test_forgetting_leaves_nothing():
    survival = SurvivalEstimator()
    chain(survival, 0, 0.9, 3, 100)
    shared = survival.estimate_survival([7], 3)
    chain(survival, 7, 0.1, 3, 0)
    survival.record_draft(7, 3, 2, ())
    survival.forget([0, 7])
    assert (
        survival.estimate_survival([0], 3) == survival.estimate_survival([7], 3) == survival.estimate_survival([99], 3)
    )
    assert shared[0][0] > survival.estimate_survival([99], 3)[0][0]
    assert not survival._accepted_rates._tally_by_slot
    assert not survival._drafted_rates._tally_by_slot


def test_a_pause_makes_uncertain():
    steady, paused = SurvivalEstimator(), SurvivalEstimator()
    for survival in (steady, paused):
        chain(survival, 0, 0.0, 2, 200)
    for _ in range(2000):
        paused.record_idle(0)
        paused.record_pause()
    before = paused.estimate_survival([0], 1)[0][0]
    for survival in (steady, paused):
        chain(survival, 0, 1.0, 2, 6)
    assert before < 0.25
    assert paused.estimate_survival([0], 1)[0][0] > steady.estimate_survival([0], 1)[0][0] + 0.1


def test_doubt_keeps_the_estimate_and_hurries_the_next():
    steady, doubted = SurvivalEstimator(), SurvivalEstimator()
    for survival in (steady, doubted):
        chain(survival, 0, 1.0, 1, 300)
    doubted.discount_evidence()
    assert doubted.estimate_survival([0], 1)[0][0] > 0.85
    for survival in (steady, doubted):
        chain(survival, 0, 0.0, 1, 20)
    assert doubted.estimate_survival([0], 1)[0][0] < steady.estimate_survival([0], 1)[0][0] - 0.1


@given(st.data())
def test_estimates_are_chances_that_fall(data):
    survival = SurvivalEstimator()
    is_tree = data.draw(st.booleans())
    for _ in range(data.draw(st.integers(0, 40))):
        slot, budget = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 6))
        drafted = data.draw(st.integers(0, budget))
        nodes = st.sets(st.integers(1, drafted)) if drafted else st.just(set())
        kept = data.draw(nodes.map(sorted)) if is_tree else list(range(1, data.draw(st.integers(0, drafted)) + 1))
        survival.record_draft(slot, budget, drafted, tuple(kept))
    for table in (survival.estimate_survival([0, 1, 5], 9), survival.estimate_draft_probs([0, 1, 5], 9)):
        for row in table:
            assert all(0.0 <= x <= 1.0 + 1e-12 for x in row)
            assert all(a >= b - 1e-12 for a, b in itertools.pairwise(row))


def test_weights_never_overflow():
    survival = SurvivalEstimator()
    chain(survival, 0, 0.5, 1, 20_000)
    assert survival.estimate_survival([0], 1)[0][0] == pytest.approx(0.5, abs=0.15)


def test_a_lucky_probe_does_not_outweigh_all_drafts_before_a_long_pause():
    """Fault: `aggressive` resumed after four steps whose few copies were accepted; then drafts lost a quarter."""
    survival = SurvivalEstimator()
    for slot in range(4):
        chain(survival, slot, 0.1, 2, 60, seed=slot)
        survival.forget([slot])
    for _ in range(600):
        survival.record_pause(16)
    for slot in range(4, 8):
        chain(survival, slot, 1.0, 2, 4)
        survival.forget([slot])
    assert 0.3 < survival.estimate_survival([9], 2)[0][0] < 0.5
