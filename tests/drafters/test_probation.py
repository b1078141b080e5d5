"""When a drafter that fails rests, for how long, and how long a proposal may take.

All by a clock that the test moves.
"""

import pytest

from foredraft.drafters.probation import (
    FEWEST,
    FIRST_REST,
    LEAST,
    LONGEST_REST,
    MAX_FAILURES,
    PENANCE,
    RATIO,
    SOUND,
    Pace,
    Probation,
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def resting(clock: Clock) -> Probation:
    probation = Probation("draft", clock)
    for _ in range(MAX_FAILURES):
        assert not probation.is_resting
        probation.failed("raised", "propose: broken")
    assert probation.is_resting
    return probation


def length_of_rest(probation: Probation, clock: Clock) -> float:
    """Seconds until it is tried again, to half a second."""
    began = clock.now
    while probation.is_resting:
        clock.now += 0.5
        probation.wake()
    return clock.now - began


def test_a_rest_ends_and_the_next_is_twice_as_long_up_to_a_bound() -> None:
    clock = Clock()
    probation = resting(clock)
    lengths = []
    for _ in range(9):
        lengths.append(length_of_rest(probation, clock))
        probation.failed("raised", "propose: broken")
        assert probation.is_resting, "after a rest one failure is enough"
    assert lengths == [min(FIRST_REST * 2**n, LONGEST_REST) for n in range(9)]
    assert lengths[-1] == LONGEST_REST
    assert probation.failures == {"raised": MAX_FAILURES + 9}


def test_sound_proposals_clear_the_count_and_the_length_of_the_rest() -> None:
    clock = Clock()
    probation = resting(clock)
    length_of_rest(probation, clock)
    for _ in range(SOUND):
        probation.took(0.01)
    probation.failed("raised", "propose: broken")
    assert not probation.is_resting
    for _ in range(MAX_FAILURES - 1):
        probation.failed("raised", "propose: broken")
    assert length_of_rest(probation, clock) == FIRST_REST


def test_fewer_sound_proposals_than_that_clear_nothing() -> None:
    clock = Clock()
    probation = Probation("draft", clock)
    for _ in range(MAX_FAILURES - 1):
        probation.failed("malformed", "propose: no tree")
        for _ in range(SOUND - 1):
            probation.took(0.01)
    assert not probation.is_resting
    probation.failed("malformed", "propose: no tree")
    assert probation.is_resting


def test_a_slow_call_is_paid_for_by_a_longer_rest_and_cleared_later() -> None:
    """Whatever its rhythm, a slow drafter costs no more than a share of the time."""
    clock = Clock()
    probation = Probation("draft", clock)
    for _ in range(MAX_FAILURES):
        probation.took(9.0)
    assert probation.failures == {"slow": MAX_FAILURES}
    assert length_of_rest(probation, clock) == 9.0 * PENANCE
    probation = Probation("draft", clock)
    for _ in range(MAX_FAILURES):
        for _ in range(SOUND):
            probation.took(0.01)
            clock.now += 0.01
        probation.took(9.0)
    assert probation.is_resting, "proposals in between were sound, and too short to matter"


@pytest.mark.parametrize("name", ["draft", ""])
def test_the_log_names_the_drafter_and_says_how_long_it_rests(name: str, caplog: pytest.LogCaptureFixture) -> None:
    probation = Probation(name, Clock())
    for _ in range(MAX_FAILURES):
        probation.failed("raised", "propose: broken")
    assert caplog.messages[0] == f"the drafter {name}".strip() + " failed (raised, propose: broken); ignored"
    assert caplog.messages[-1].endswith("; it rests for 5 s")


# the pace


def test_a_proposal_may_take_no_longer_than_some_passes_of_the_target() -> None:
    pace = Pace(5.0)
    for _ in range(FEWEST):
        pace.passed(0.04, has_prompt=False)
    assert pace.proposed(1.9) is None
    assert pace.proposed(2.1) == RATIO * 0.04


@pytest.mark.parametrize(("seconds", "limit"), [(0.001, LEAST), (10.0, 5.0)])
def test_the_limit_lies_between_a_least_and_the_timeout(seconds: float, limit: float) -> None:
    pace = Pace(5.0)
    for _ in range(FEWEST):
        pace.passed(seconds, has_prompt=False)
    assert pace.proposed(limit) is None
    assert pace.proposed(limit + 0.1) == limit


def test_the_first_proposals_have_the_whole_timeout() -> None:
    """They compile and allocate, and no ordinary pass was seen yet."""
    pace = Pace(5.0)
    for _ in range(FEWEST - 1):
        pace.passed(0.001, has_prompt=False)
    assert pace.proposed(4.9) is None
    assert pace.proposed(5.1) == 5.0


def test_a_prompt_may_be_read_as_long_as_the_target_read_it() -> None:
    """Once: the proposals after that one have read it."""
    pace = Pace(5.0)
    for _ in range(FEWEST):
        pace.passed(0.001, has_prompt=False)
    pace.passed(30.0, has_prompt=True)
    assert pace.proposed(30.5) is None
    assert pace.proposed(30.5) == LEAST


def test_a_timeout_below_the_least_is_kept() -> None:
    pace = Pace(0.25)
    assert pace.proposed(0.2) is None
    assert pace.proposed(0.3) == 0.25
