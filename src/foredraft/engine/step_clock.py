"""Times of a step."""

from collections.abc import Callable

PLAN_MEMORY = 32  # steps over which the time of planning is averaged


class StepClock:
    """Seconds of a step, and of the two parts of it that belong to the drafter.

    Planning takes long in the few steps that choose new draft lengths. Every step therefore counts its mean time, so
    that the size of those few does not seem costly. Steps with and without drafts have a mean each.

    `propose_seconds` and `observe_seconds` are those of the last call of each part. While a step runs and has not
    observed yet, `observe_seconds` is therefore that of the step before.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        """Set up a clock; `now` returns the time in seconds."""
        self._now = now
        self.propose_seconds = 0.0
        self.observe_seconds = 0.0  # preparing the input of `Drafter.observe` included
        self._step_start = 0.0
        self._part_start = 0.0
        self._plan_excess = 0.0  # seconds of planning this step beyond the mean
        self._plan_means = {False: MeanTime(), True: MeanTime()}  # by whether the step has drafts

    def start_step(self) -> None:
        self._step_start = self._now()
        self._plan_excess = 0.0

    def end_plan(self, has_drafts: bool) -> None:
        """End the planning of the step, its first part."""
        seconds = self._now() - self._step_start
        self._plan_excess = seconds - self._plan_means[has_drafts].add(seconds)

    def start_part(self) -> None:
        self._part_start = self._now()

    def end_propose(self) -> None:
        self.propose_seconds = self._now() - self._part_start

    def end_observe(self) -> None:
        self.observe_seconds = self._now() - self._part_start

    def reset(self) -> None:
        """Forget the times of a step that raised."""
        self.propose_seconds = self.observe_seconds = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds since `start_step`, with the mean time of planning."""
        return self._now() - self._step_start - self._plan_excess


class MeanTime:
    """Mean of the last PLAN_MEMORY times, about."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._weight = 0

    def add(self, seconds: float) -> float:
        """Add a time and return the mean."""
        self._weight = min(self._weight + 1, PLAN_MEMORY)
        self._mean += (seconds - self._mean) / self._weight
        return self._mean
