"""Runs of plain steps: whole once begun, early at the start and at another load, and then after the interval."""

from foredraft.draft_length.plain_run import FIRST_INTERVAL, FIRST_RUN_STEPS, RUN_STEPS, PlainRun


def take_steps(run: PlainRun, load: int, num_steps: int, interval: float) -> list[bool]:
    taken: list[bool] = []
    since_plain = 0
    for _ in range(num_steps):
        taken.append(run.take_step(load, since_plain, interval))
        since_plain = 0 if taken[-1] else since_plain + 1
    return taken


def test_a_run_is_whole_and_begins_after_the_interval() -> None:
    first = [False] * 10 + [True] * FIRST_RUN_STEPS
    period = [False] * 10 + [True] * RUN_STEPS
    assert take_steps(PlainRun(), 4, 60, 10.0) == (first + period * 4)[:60]


def test_early_runs_come_at_doubling_intervals() -> None:
    first = [False] * FIRST_INTERVAL + [True] * FIRST_RUN_STEPS
    second = [False] * 2 * FIRST_INTERVAL + [True] * RUN_STEPS
    third = [False] * 4 * FIRST_INTERVAL + [True] * RUN_STEPS
    expected = first + second + third
    assert take_steps(PlainRun(), 4, len(expected), 1000.0) == expected


def test_a_load_that_more_than_doubles_begins_anew() -> None:
    run = PlainRun()
    take_steps(run, 4, 200, 1000.0)
    first = [False] * FIRST_INTERVAL + [True] * FIRST_RUN_STEPS
    assert take_steps(run, 8, len(first), 1000.0) == [False] * len(first), "twice the load is similar"
    assert take_steps(run, 9, len(first), 1000.0) == first
