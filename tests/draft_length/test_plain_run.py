"""Runs of plain steps: whole once begun, early at the start and at another load, and then after the interval.

The less drafts are predicted to gain, the longer a run is, and the later its first step that counts.
"""

import pytest

from foredraft.draft_length.intervals import MAX_PLAIN_INTERVAL
from foredraft.draft_length.plain_run import (
    CLEAR_GAIN,
    CLEAR_INTERVAL,
    FIRST_INTERVAL,
    MAX_TRANSITION_STEPS,
    MIN_TRANSITION_STEPS,
    NEW_LOAD_STEPS,
    NUM_FIRST_MEASURED,
    NUM_MEASURED,
    PlainRun,
    count_run_steps,
    count_transition_steps,
)

GAIN = 0.1  # predicted, if a test does not say otherwise
FIRST_RUN_STEPS, RUN_STEPS = MAX_TRANSITION_STEPS + NUM_FIRST_MEASURED, count_run_steps(GAIN)


def take_steps(run: PlainRun, load: int, num_steps: int, interval: float, gain: float = GAIN) -> list[bool]:
    taken: list[bool] = []
    since_plain = 0
    for _ in range(num_steps):
        run.adapt_to_load(load)
        taken.append(run.take_step(since_plain, interval, gain))
        since_plain = 0 if taken[-1] else since_plain + 1
    return taken


FIRST = [False] * FIRST_INTERVAL + [True] * FIRST_RUN_STEPS


def test_a_run_is_whole_and_begins_after_the_interval() -> None:
    first = [False] * 10 + [True] * FIRST_RUN_STEPS
    period = [False] * 10 + [True] * RUN_STEPS
    assert take_steps(PlainRun(), 4, 60, 10.0) == (first + period * 4)[:60]


def test_early_runs_come_at_doubling_intervals() -> None:
    second = [False] * 2 * FIRST_INTERVAL + [True] * RUN_STEPS
    third = [False] * 4 * FIRST_INTERVAL + [True] * RUN_STEPS
    expected = FIRST + second + third
    assert take_steps(PlainRun(), 4, len(expected), 1000.0) == expected


def test_runs_are_late_and_short_while_drafts_clearly_pay() -> None:
    run = PlainRun()
    clear = ([False] * CLEAR_INTERVAL + [True] * count_run_steps(CLEAR_GAIN)) * 2
    assert take_steps(run, 4, len(clear), 1000.0, CLEAR_GAIN) == clear
    assert take_steps(run, 4, 40, 10.0, CLEAR_GAIN)[10], "the interval for a load that is known holds all the same"
    steps = count_transition_steps(CLEAR_GAIN - 0.01) + NUM_FIRST_MEASURED
    early = [False] * FIRST_INTERVAL + [True] * steps
    assert take_steps(PlainRun(), 4, len(early), 1000.0, CLEAR_GAIN - 0.01) == early


def test_no_run_begins_in_a_step_of_another_size_and_one_that_runs_goes_on() -> None:
    run = PlainRun()
    run.adapt_to_load(4)
    assert not run.take_step(FIRST_INTERVAL, 1000.0, 0.1, is_typical=False)
    assert run.take_step(FIRST_INTERVAL + 1, 1000.0, 0.1)
    assert run.take_step(0, 1000.0, 0.1, is_typical=False)


def test_a_run_begins_at_last_though_every_step_has_a_prompt() -> None:
    run = PlainRun()
    run.adapt_to_load(4)
    assert not run.take_step(MAX_PLAIN_INTERVAL - 1, 1000.0, 0.1, is_typical=False)
    assert run.take_step(MAX_PLAIN_INTERVAL, 1000.0, 0.1, is_typical=False)


def test_a_load_that_doubles_begins_with_a_run_and_one_that_falls_with_drafts() -> None:
    run = PlainRun()
    take_steps(run, 4, 200, 1000.0)
    assert not run.adapt_to_load(7)
    assert run.adapt_to_load(8)
    assert run.num_transition_steps == MIN_TRANSITION_STEPS
    assert take_steps(run, 8, NEW_LOAD_STEPS + len(FIRST), 1000.0) == [True] * NEW_LOAD_STEPS + FIRST
    assert run.num_transition_steps == MAX_TRANSITION_STEPS
    assert not run.adapt_to_load(3)
    assert take_steps(run, 3, len(FIRST), 1000.0) == FIRST


def test_a_load_that_swings_between_one_and_twice_begins_one_run() -> None:
    run = PlainRun()
    assert [run.adapt_to_load(load) for load in (4, 8, 4, 8, 4, 8)] == [False, True, False, False, False, False]


def test_the_less_drafts_gain_the_later_a_plain_step_counts() -> None:
    numbers = [count_transition_steps(gain) for gain in (-1.0, 0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 5.0)]
    assert numbers == [10, 10, 10, 10, 7, 4, 3, 2, 2]
    assert [count_run_steps(gain) for gain in (0.0, 0.5, 5.0)] == [n + NUM_MEASURED for n in (10, 4, 2)]


@pytest.mark.parametrize("gain", [0.05, 0.5, 2.0])
def test_a_run_says_how_many_of_its_steps_do_not_count(gain: float) -> None:
    run = PlainRun()
    taken = take_steps(run, 4, 200, 1000.0, gain)
    assert run.num_transition_steps == count_transition_steps(gain)
    first = taken[taken.index(True) :]
    assert first.index(False) > run.num_transition_steps


def test_a_run_that_a_pause_cuts_off_does_not_go_on_after_it() -> None:
    run = PlainRun()
    run.adapt_to_load(4)
    assert run.take_step(FIRST_INTERVAL, 1000.0, GAIN)
    run.stop()
    assert not run.take_step(1, 1000.0, GAIN)


def test_a_run_goes_on_without_an_interval_at_a_similar_load_alone() -> None:
    run = PlainRun()
    run.adapt_to_load(4)
    assert not run.take_next(4)
    assert run.take_step(FIRST_INTERVAL, 1000.0, GAIN)
    assert not run.take_next(8)
    assert [run.take_next(7) for _ in range(FIRST_RUN_STEPS)] == [True] * (FIRST_RUN_STEPS - 1) + [False]


def test_steps_soon_after_a_prompt_are_none_of_those_that_count() -> None:
    run = PlainRun()
    run.adapt_to_load(4)
    taken = [run.take_step(FIRST_INTERVAL, 1000.0, GAIN)]
    taken += [run.take_next(4, is_disturbed=True) for _ in range(FIRST_RUN_STEPS)]
    taken += [run.take_next(4) for _ in range(NUM_MEASURED + 1)]
    assert taken == [True] * (1 + FIRST_RUN_STEPS + NUM_MEASURED) + [False]
