"""Held decisions: the same batch only, and never across a multiple of the interval."""

from foredraft.draft_length.held_decision import HOLD_INTERVAL, HeldDecision
from foredraft.draft_length.policy import DraftCandidate

BATCH = [DraftCandidate(0, 8), DraftCandidate(1, 8)]


def test_a_decision_holds_until_the_next_multiple() -> None:
    held = HeldDecision()
    held.hold(2, BATCH, [3, 1])
    assert [held.find(step, 2, BATCH) for step in range(1, HOLD_INTERVAL + 1)] == [[3, 1]] * (HOLD_INTERVAL - 1) + [
        None
    ]


def test_another_batch_has_to_be_decided() -> None:
    held = HeldDecision()
    assert held.find(1, 2, BATCH) is None
    held.hold(2, BATCH, [3, 1])
    assert held.find(1, 3, BATCH) is None
    assert held.find(1, 2, [BATCH[0]]) is None
    assert held.find(1, 2, [BATCH[0], DraftCandidate(1, 2)]) is None
    held.release()
    assert held.find(1, 2, BATCH) is None


def test_the_held_nodes_cannot_be_changed() -> None:
    held = HeldDecision()
    held.hold(2, BATCH, [3, 1])
    found = held.find(1, 2, BATCH)
    assert found is not None
    found[0] = 7
    assert held.find(2, 2, BATCH) == [3, 1]
