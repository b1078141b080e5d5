"""Runs of plain steps: whole once begun, and again only after the interval."""

from foredraft.draft_length.plain_run import RUN_STEPS, PlainRun


def test_a_run_is_whole_and_begins_after_the_interval() -> None:
    run, taken, since_plain = PlainRun(), [], 0
    for _ in range(40):
        taken.append(run.take_step(since_plain, 10.0))
        since_plain = 0 if taken[-1] else since_plain + 1
    period = [False] * 10 + [True] * RUN_STEPS
    assert taken == (period * 4)[:40]
