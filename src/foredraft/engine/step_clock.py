"""Times of a step."""

from collections.abc import Callable


class StepClock:
    """Seconds of a step, and of the two parts of it that belong to the drafter.

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

    def start_step(self) -> None:
        self._step_start = self._now()

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
        """Seconds since `start_step`."""
        return self._now() - self._step_start
