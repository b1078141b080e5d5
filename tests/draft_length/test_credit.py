"""Time credit: its cap, its allowance and its loans."""

import pytest

from foredraft.draft_length.credit import (
    DEFAULT_TERMS,
    MAX_COST_DECAY,
    MAX_CREDIT_STEPS,
    MIN_LOSS_ALLOWANCE,
    NEW_LOAD_STEPS,
    CreditTerms,
    TimeCredit,
)

LONG_STEP = 8.0  # seconds of a step with long drafts; a plain step takes 1


def make_rich_credit() -> TimeCredit:
    """Make the credit of a request whose long drafts were accepted: it is at the cap of its costliest steps."""
    credit = TimeCredit()
    for _ in range(200):
        credit.record_step(1.0, 1.0, step_seconds=LONG_STEP, saved_later=30.0)
    assert credit.seconds == MAX_CREDIT_STEPS * LONG_STEP
    return credit


def test_a_skipped_step_keeps_the_credit_that_long_drafts_earned() -> None:
    """Fault: the first skipped step cut the credit to the cap of plain steps, a loss of 168 plain steps here."""
    credit = make_rich_credit()
    credit.record_skipped_step()
    assert credit.seconds == pytest.approx(MAX_CREDIT_STEPS * LONG_STEP * MAX_COST_DECAY)


def test_the_cap_falls_to_that_of_plain_steps_while_no_request_drafts() -> None:
    credit = make_rich_credit()
    for _ in range(400):
        credit.record_skipped_step()
    assert credit.seconds == MAX_CREDIT_STEPS


def test_a_skipped_step_adds_the_allowance_of_a_plain_step() -> None:
    credit = TimeCredit()
    credit.record_step(2.0, 2.0, step_seconds=20.0)
    before = credit.seconds
    credit.record_skipped_step()
    assert credit.seconds == pytest.approx(before + DEFAULT_TERMS.allowance * 2.0)


def test_a_step_that_the_drafter_does_not_observe_adds_the_whole_allowance() -> None:
    """Fault: a drafter at rest took no time, but the credit still grew by a quarter, so no probe was affordable."""
    credit = TimeCredit()
    credit.record_step(1.0, 1.0, observing=0.1)
    assert credit.observing_share == pytest.approx(0.1)
    for is_observed, allowance in ((True, MIN_LOSS_ALLOWANCE), (False, DEFAULT_TERMS.allowance)):
        before = credit.seconds
        credit.record_skipped_step(is_observed)
        assert credit.seconds == pytest.approx(before + allowance)


def test_a_loan_ends_with_the_first_step_that_leaves_no_debt() -> None:
    credit = TimeCredit()
    credit.record_step(1.0, 1.0)
    credit.grant_loan(5.0)
    credit.record_step(1.0, 1.0, step_seconds=credit.seconds + 4.0)
    assert credit.seconds < 0
    assert not credit.is_used_up
    credit.record_step(1.0, 1.0, step_seconds=1.0, saved_later=10.0)
    credit.record_step(1.0, 1.0, step_seconds=1.5 + credit.seconds)
    assert credit.is_used_up


def test_a_larger_load_keeps_a_few_steps_of_the_credit() -> None:
    credit = TimeCredit()
    credit.record_step(1.0, 1.0)
    credit.seconds = 20.0
    credit.limit_at_larger_load()
    assert credit.seconds == NEW_LOAD_STEPS
    credit.seconds = -3.0
    credit.limit_at_larger_load()
    assert credit.seconds == -3.0


def test_terms_set_the_credit_at_the_start_and_the_allowance() -> None:
    credit = TimeCredit(CreditTerms(allowance=0.1, initial_steps=3.0))
    credit.record_step(2.0, 2.0)
    assert credit.seconds == pytest.approx(3.0 * 2.0 + 0.1 * 2.0)


def test_the_gain_is_the_time_that_recent_steps_saved_as_a_share_of_theirs() -> None:
    credit = TimeCredit()
    assert credit.gain == 0.0
    for _ in range(300):
        credit.record_step(1.0, 1.0, step_seconds=2.0, saved_later=2.0)  # three plain steps in the time of two
    assert credit.gain == pytest.approx(0.5)
    credit.record_step(1.0, 1.0)  # a plain step shows nothing of drafts
    assert credit.gain == pytest.approx(0.5)
    for _ in range(300):
        credit.record_step(1.0, 1.0, step_seconds=2.0)
    assert credit.gain == pytest.approx(-0.5, abs=1e-3)
