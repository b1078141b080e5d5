"""Times of a step: parts, and planning, whose mean counts."""

import pytest

from foredraft.engine.step_clock import PLAN_MEMORY, StepClock


class Hand:
    """A clock whose time is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self) -> float:
        return self.now


def run_step(hand: Hand, clock: StepClock, planning: float, rest: float, has_drafts: bool = True) -> float:
    clock.start_step()
    hand.now += planning
    clock.end_plan(has_drafts)
    hand.now += rest
    return clock.step_seconds


def test_a_step_that_plans_for_long_is_not_longer_than_others() -> None:
    hand = Hand()
    clock = StepClock(hand.read)
    seconds = [run_step(hand, clock, planning=1.0 if i % 8 == 0 else 0.0, rest=10.0) for i in range(20 * PLAN_MEMORY)]
    late = seconds[-8:]
    assert max(late) - min(late) < 0.05
    assert sum(late) / 8 == pytest.approx(10.0 + 1.0 / 8, rel=0.005), "no time is lost"


def test_steps_without_drafts_have_a_mean_of_their_own() -> None:
    hand = Hand()
    clock = StepClock(hand.read)
    for _ in range(10):
        assert run_step(hand, clock, planning=2.0, rest=5.0) == pytest.approx(7.0)
        assert run_step(hand, clock, planning=0.1, rest=5.0, has_drafts=False) == pytest.approx(5.1)


def test_a_step_that_raised_leaves_nothing_behind() -> None:
    hand = Hand()
    clock = StepClock(hand.read)
    run_step(hand, clock, planning=0.0, rest=1.0)
    clock.start_step()
    hand.now += 3.0
    clock.end_plan(has_drafts=True)
    clock.reset()
    clock.start_step()
    hand.now += 1.0
    assert clock.step_seconds == pytest.approx(1.0)


def test_parts_of_the_drafter() -> None:
    hand = Hand()
    clock = StepClock(hand.read)
    for has_drafts, expected in ((True, (2.0, 2.0)), (False, (0.0, 2.0))):
        run_step(hand, clock, planning=0.0, rest=0.0, has_drafts=has_drafts)
        for end in (clock.end_propose, clock.end_observe):
            clock.start_part()
            hand.now += 2.0
            end()
        assert (clock.propose_seconds, clock.observe_seconds) == expected
    clock.reset()
    assert (clock.propose_seconds, clock.observe_seconds) == (0.0, 0.0)


def test_a_step_with_drafts_counts_the_time_of_recording_those_before_it() -> None:
    hand = Hand()
    clock = StepClock(hand.read)

    def run_and_record(has_drafts: bool, recording: float) -> float:
        seconds = run_step(hand, clock, planning=0.0, rest=1.0, has_drafts=has_drafts)
        clock.start_part()
        hand.now += recording
        clock.end_record()
        return seconds

    found = [run_and_record(has_drafts=i % 2 == 0, recording=0.5 if i % 2 == 0 else 9.0) for i in range(6)]
    assert found == pytest.approx([1.0, 1.0, 1.5, 1.0, 1.5, 1.0])
