"""Schedule of probes: the interval doubles while probes show nothing, and a costly probe waits longer."""

import pytest

from foredraft.draft_length.probes import (
    MAX_EXTENSIONS,
    MAX_PROBE_INTERVAL,
    MAX_PROBE_SHARE,
    MIN_PROBE_INTERVAL,
    PROBE_STEPS,
    ProbeSchedule,
)


def probe(schedule: ProbeSchedule, step: int, price: float, has_paid: bool = False, is_hopeless: bool = True) -> int:
    """Run a probe from this step on, and return the steps from its end to the next one."""
    schedule.start((0,), price)
    for _ in range(PROBE_STEPS - 1):
        assert not schedule.count_step()
    assert schedule.count_step()
    schedule.finish(step + PROBE_STEPS, has_paid, is_hopeless)
    return schedule.next_step - step - PROBE_STEPS


def test_the_interval_of_a_cheap_probe_doubles_up_to_its_limit() -> None:
    schedule = ProbeSchedule()
    intervals = [probe(schedule, step, price=0.1) for step in range(0, 5000, 1000)]
    assert intervals == [min(MIN_PROBE_INTERVAL * 2**i, MAX_PROBE_INTERVAL) for i in range(1, 6)]


@pytest.mark.parametrize("price", [6.0, 40.0])
def test_probes_that_show_nothing_take_their_share_of_the_time_at_most(price: float) -> None:
    schedule, step = ProbeSchedule(), 0
    for _ in range(3):
        step += probe(schedule, step, price) + PROBE_STEPS
    assert 3 * price <= MAX_PROBE_SHARE * step


def test_a_costly_probe_does_not_wait_while_drafts_nearly_pay() -> None:
    assert probe(ProbeSchedule(), 0, price=40.0, is_hopeless=False) == 2 * MIN_PROBE_INTERVAL


def test_a_probe_that_paid_is_followed_soon() -> None:
    assert probe(ProbeSchedule(), 0, price=40.0, has_paid=True) == MIN_PROBE_INTERVAL


def test_a_load_that_halves_has_probes_twice_as_often_and_one_that_doubles_waits_as_before() -> None:
    """Fault: every change reset the interval, so a batch that drained and filled again was probed all the time."""
    schedule = ProbeSchedule()
    schedule.adapt_to_load(8, 0)
    for step in (0, 1000, 2000):
        probe(schedule, step, price=0.1)
    due = schedule.next_step
    assert due == 2000 + PROBE_STEPS + MAX_PROBE_INTERVAL
    for load in (16, 9, 31):
        schedule.adapt_to_load(load, 2010)
        assert schedule.next_step == due
    schedule.adapt_to_load(7, 2010)
    assert schedule.next_step == 2010 + MAX_PROBE_INTERVAL // 2
    for load in (3, 1):
        schedule.adapt_to_load(load, 2010)
    assert schedule.next_step == 2010 + MIN_PROBE_INTERVAL


def test_a_probe_goes_on_a_limited_number_of_times() -> None:
    schedule = ProbeSchedule()
    schedule.start((0,), 1.0)
    for extension in range(MAX_EXTENSIONS + 1):
        assert schedule.is_in_first_step
        for _ in range(PROBE_STEPS - 1):
            assert not schedule.count_step()
            assert not schedule.is_in_first_step
        assert schedule.count_step()
        assert schedule.extend() == (extension < MAX_EXTENSIONS)
    schedule.finish(100, has_paid=False)
    assert not schedule.is_in_first_step
    schedule.start((0,), 1.0)
    assert schedule.extend(), "the next probe may go on again"
