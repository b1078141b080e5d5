"""Times of a step."""

from collections.abc import Callable

PLAN_MEMORY = 32  # steps over which the time of planning, and that of recording, is averaged


class StepClock:
    """Seconds of a step, and of the two parts of it that belong to the drafter.

    Planning takes long in the few steps that choose new draft lengths. Every step therefore counts its mean time, so
    that the size of those few does not seem costly. Steps with and without drafts have a mean each.

    The policy records a step after the step has been reported. A step with drafts therefore counts the mean time of
    recording those before it. Recording a step without drafts takes no longer than in plain decoding.

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
        self._record_mean = MeanTime()  # of steps with drafts
        self._has_drafts = False

    def start_step(self) -> None:
        self._step_start = self._now()
        self._plan_excess = 0.0

    def end_plan(self, has_drafts: bool) -> None:
        """End the planning of the step, its first part."""
        seconds = self._now() - self._step_start
        self._has_drafts = has_drafts
        self._plan_excess = seconds - self._plan_means[has_drafts].add(seconds)

    def start_part(self) -> None:
        self._part_start = self._now()

    def end_propose(self) -> None:
        """End the proposal. A step without drafts has none: plain decoding makes the same tree of roots."""
        self.propose_seconds = self._now() - self._part_start if self._has_drafts else 0.0

    def end_observe(self) -> None:
        self.observe_seconds = self._now() - self._part_start

    def end_record(self) -> None:
        """End the recording of the step by the policy, its last part."""
        if self._has_drafts:
            self._record_mean.add(self._now() - self._part_start)

    def reset(self) -> None:
        """Forget the times of a step that raised."""
        self.propose_seconds = self.observe_seconds = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds since `start_step`, with the mean times of planning and of recording."""
        recording = self._record_mean.value if self._has_drafts else 0.0
        return self._now() - self._step_start - self._plan_excess + recording


class MeanTime:
    """Mean of the last PLAN_MEMORY times, about.

    Attributes:
        value: the mean, in seconds; 0 without a time.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self._weight = 0

    def add(self, seconds: float) -> float:
        """Add a time and return the mean."""
        self._weight = min(self._weight + 1, PLAN_MEMORY)
        self.value += (seconds - self.value) / self._weight
        return self.value
