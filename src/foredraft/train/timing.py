"""Speed of a run, and the number of steps that fit into its time."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]
WINDOW_STEPS = 20  # steps in the moving averages; a slow step has no effect after this many others
FIT_EVERY = 10  # steps between two fits of the number of steps to the time
MARGIN = 0.98  # share of the remaining time that steps are planned for


@dataclass
class StepTimer:
    """Timer of the steps of this run, with averages over the latest WINDOW_STEPS."""

    clock: Clock = time.monotonic
    start_time: float = field(init=False)
    _recent: deque[tuple[float, int]] = field(init=False)
    _total_step_seconds: float = field(init=False)  # seconds in all steps, without the time between steps
    _num_steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.start_time = self.clock()
        self._recent = deque(maxlen=WINDOW_STEPS)
        self._total_step_seconds, self._num_steps = 0.0, 0

    def record_step(self, seconds: float, tokens: int) -> None:
        """Record a step. Evaluations and checkpoints between steps are not part of it."""
        self._recent.append((max(seconds, 1e-9), tokens))
        self._total_step_seconds += seconds
        self._num_steps += 1

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the run began, including the time between steps."""
        return self.clock() - self.start_time

    @property
    def step_seconds(self) -> float:
        return sum(seconds for seconds, _ in self._recent) / len(self._recent)

    @property
    def tokens_per_second(self) -> float:
        return sum(tokens for _, tokens in self._recent) / sum(seconds for seconds, _ in self._recent)

    def fit_num_steps(self, step: int, max_total_steps: int, max_seconds: float) -> int:
        """Return the number of steps of the whole run that end in time.

        Args:
            step: Number of completed steps, those of earlier runs included.
            max_total_steps: Upper limit of the result.
            max_seconds: Time of this run.
        """
        remaining = MARGIN * (max_seconds - self.elapsed_seconds)
        # Evaluations and checkpoints, per step.
        seconds_between = max(0.0, self.elapsed_seconds - self._total_step_seconds) / self._num_steps
        return min(max_total_steps, step + max(1, int(remaining / (self.step_seconds + seconds_between))))
