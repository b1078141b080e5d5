"""When a drafter that fails rests, for how long, and how long a proposal may take.

All by a clock that the test moves.
"""

import pytest

from foredraft.drafters.failure_backoff import (
    FIRST_QUARANTINE,
    MAX_FAILURES,
    MAX_PASS_RATIO,
    MAX_QUARANTINE,
    MIN_PASSES,
    MIN_TIMEOUT,
    SLOW_CALL_FACTOR,
    SUCCESSES_TO_CLEAR,
    FailureBackoff,
    ProposalTimeLimit,
)


class Clock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def resting(clock: Clock) -> FailureBackoff:
    backoff = FailureBackoff("draft", clock)
    for _ in range(MAX_FAILURES):
        assert not backoff.is_quarantined
        backoff.record_failure("raised", "propose: broken")
    assert backoff.is_quarantined
    return backoff


def length_of_rest(backoff: FailureBackoff, clock: Clock) -> float:
    """Seconds until it is tried again, to half a second."""
    began = clock.now
    while backoff.is_quarantined:
        clock.now += 0.5
        backoff.release_if_due()
    return clock.now - began


def test_a_rest_ends_and_the_next_is_twice_as_long_up_to_a_bound() -> None:
    clock = Clock()
    backoff = resting(clock)
    lengths = []
    for _ in range(9):
        lengths.append(length_of_rest(backoff, clock))
        backoff.record_failure("raised", "propose: broken")
        assert backoff.is_quarantined, "after a rest one failure is enough"
    assert lengths == [min(FIRST_QUARANTINE * 2**n, MAX_QUARANTINE) for n in range(9)]
    assert lengths[-1] == MAX_QUARANTINE
    assert backoff.failures == {"raised": MAX_FAILURES + 9}


def test_sound_proposals_clear_the_count_and_the_length_of_the_rest() -> None:
    clock = Clock()
    backoff = resting(clock)
    length_of_rest(backoff, clock)
    for _ in range(SUCCESSES_TO_CLEAR):
        backoff.record_call(0.01)
    backoff.record_failure("raised", "propose: broken")
    assert not backoff.is_quarantined
    for _ in range(MAX_FAILURES - 1):
        backoff.record_failure("raised", "propose: broken")
    assert length_of_rest(backoff, clock) == FIRST_QUARANTINE


def test_fewer_sound_proposals_than_that_clear_nothing() -> None:
    clock = Clock()
    backoff = FailureBackoff("draft", clock)
    for _ in range(MAX_FAILURES - 1):
        backoff.record_failure("malformed", "propose: no tree")
        for _ in range(SUCCESSES_TO_CLEAR - 1):
            backoff.record_call(0.01)
    assert not backoff.is_quarantined
    backoff.record_failure("malformed", "propose: no tree")
    assert backoff.is_quarantined


def test_a_slow_call_is_paid_for_by_a_longer_rest_and_cleared_later() -> None:
    """A slow drafter costs no more than a share of the time, whatever its rhythm."""
    clock = Clock()
    backoff = FailureBackoff("draft", clock)
    for _ in range(MAX_FAILURES):
        backoff.record_call(9.0)
    assert backoff.failures == {"slow": MAX_FAILURES}
    assert length_of_rest(backoff, clock) == 9.0 * SLOW_CALL_FACTOR
    backoff = FailureBackoff("draft", clock)
    for _ in range(MAX_FAILURES):
        for _ in range(SUCCESSES_TO_CLEAR):
            backoff.record_call(0.01)
            clock.now += 0.01
        backoff.record_call(9.0)
    assert backoff.is_quarantined, "proposals in between were sound, and too short to matter"


@pytest.mark.parametrize("name", ["draft", ""])
def test_the_log_names_the_drafter_and_says_how_long_it_rests(name: str, caplog: pytest.LogCaptureFixture) -> None:
    backoff = FailureBackoff(name, Clock())
    for _ in range(MAX_FAILURES):
        backoff.record_failure("raised", "propose: broken")
    assert caplog.messages[0] == f"the drafter {name}".strip() + " failed (raised, propose: broken); ignored"
    assert caplog.messages[-1].endswith("; quarantined for 5 s")


# the pace


def test_a_proposal_may_take_no_longer_than_some_passes_of_the_target() -> None:
    pace = ProposalTimeLimit(5.0)
    for _ in range(MIN_PASSES):
        pace.record_pass(0.04, has_prompt=False)
    assert pace.check_proposal(1.9) is None
    assert pace.check_proposal(2.1) == MAX_PASS_RATIO * 0.04


@pytest.mark.parametrize(("seconds", "limit"), [(0.001, MIN_TIMEOUT), (10.0, 5.0)])
def test_the_limit_lies_between_a_least_and_the_timeout(seconds: float, limit: float) -> None:
    pace = ProposalTimeLimit(5.0)
    for _ in range(MIN_PASSES):
        pace.record_pass(seconds, has_prompt=False)
    assert pace.check_proposal(limit) is None
    assert pace.check_proposal(limit + 0.1) == limit


def test_the_first_proposals_have_the_whole_timeout() -> None:
    """They compile and allocate, and no ordinary pass was seen yet."""
    pace = ProposalTimeLimit(5.0)
    for _ in range(MIN_PASSES - 1):
        pace.record_pass(0.001, has_prompt=False)
    assert pace.check_proposal(4.9) is None
    assert pace.check_proposal(5.1) == 5.0


def test_a_prompt_may_be_read_as_long_as_the_target_read_it() -> None:
    """The longer limit holds for one proposal, the one that reads the prompt."""
    pace = ProposalTimeLimit(5.0)
    for _ in range(MIN_PASSES):
        pace.record_pass(0.001, has_prompt=False)
    pace.record_pass(30.0, has_prompt=True)
    assert pace.check_proposal(30.5) is None
    assert pace.check_proposal(30.5) == MIN_TIMEOUT


def test_a_timeout_below_the_least_is_kept() -> None:
    pace = ProposalTimeLimit(0.25)
    assert pace.check_proposal(0.2) is None
    assert pace.check_proposal(0.3) == 0.25
