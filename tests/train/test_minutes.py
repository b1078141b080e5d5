"""`--max-minutes` fits the steps to the time, by a clock that the test turns."""

from collections.abc import Callable

import pytest

from foredraft.train.run import train
from foredraft.train.timing import StepTimer
from tests.support import tiny_models
from tests.support.train_fakes import LINEAR, TrainConfig, make_method, plan, write_ids


class Slow:
    """A drafter whose every step takes `tick` seconds of its simulated clock."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def clock(self) -> float:
        return self.now

    def create_trainee(self, config, target, start=None):
        made, outer = LINEAR.training.create_trainee(config, target, start), self
        learn = made.compute_loss

        def loss(trace):
            outer.now += outer.tick
            return learn(trace)

        made.compute_loss = loss
        return made


def run_training(slow: Slow, asked):
    return train(asked, method=make_method(TrainConfig, slow.create_trainee), clock=slow.clock)


@pytest.fixture
def folder(tmp_path):
    tiny_models.llama().float().save_pretrained(tmp_path / "model")
    write_ids(tmp_path)
    return tmp_path


def rates(out) -> list[float]:
    import json

    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [entry["learning_rate"] for entry in entries if "learning_rate" in entry]


def test_the_steps_fit_the_minutes_and_the_learning_rate_ends_at_zero(folder):
    outcome = run_training(Slow(2.0), plan(folder, steps=1000, max_minutes=2.0))
    assert outcome.is_done
    assert 55 <= outcome.steps <= 60  # of two seconds
    assert outcome.step == outcome.steps
    found = rates(outcome.folder)
    assert found[-1] < 0.02 * max(found)


def test_time_enough_changes_nothing(folder):
    outcome = run_training(Slow(1.0), plan(folder, steps=30, max_minutes=1e6))
    assert (outcome.is_done, outcome.steps) == (True, 30)


def test_minutes_that_end_before_ten_steps_stop_the_run_as_before(folder):
    outcome = run_training(Slow(2.0), plan(folder, steps=30, max_minutes=0.1))
    assert not outcome.is_done
    assert outcome.step < 10
    assert outcome.steps == 30


def test_a_run_that_was_fitted_and_stopped_goes_on_to_its_fitted_end(folder):
    first = run_training(Slow(2.0), plan(folder, steps=1000, max_minutes=2.0, max_steps=15))
    assert not first.is_done
    assert first.steps < 100
    second = run_training(Slow(2.0), plan(folder, steps=1000))
    assert (second.is_done, second.steps) == (True, first.steps)


def make_clock(clock: list[float]) -> Callable[[], float]:
    return lambda: clock[0]


def test_a_stall_is_forgotten():
    now = [0.0]
    timing = StepTimer(make_clock(now))
    for _ in range(30):
        timing.record_step(1.0, 100)
    timing.record_step(60.0, 100)
    assert timing.step_seconds > 3
    for _ in range(20):
        timing.record_step(1.0, 100)
    assert timing.step_seconds == pytest.approx(1.0)
    assert timing.tokens_per_second == pytest.approx(100)


def test_no_more_steps_than_were_asked_for_and_one_at_least():
    now = [0.0]
    timing = StepTimer(make_clock(now))
    timing.record_step(1.0, 1)
    assert timing.fit_num_steps(10, 50, 1e9) == 50
    now[0] = 100.0
    assert timing.fit_num_steps(10, 50, 99.0) == 11
