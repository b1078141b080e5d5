"""How fast a run goes now, and how many steps fit into the time it has."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]
WINDOW_STEPS = 20  # steps that the mean is over: a stall is forgotten after them
FIT_EVERY = 10  # steps of this run after which the number of all steps is fitted to the time, again and again
MARGIN = 0.98  # of the time left that is planned for


@dataclass
class StepTimer:
    """The latest steps of this run: seconds and tokens of each."""

    clock: Clock = time.monotonic
    start_time: float = field(init=False)
    _recent: deque[tuple[float, int]] = field(init=False)
    _total_step_seconds: float = field(init=False)  # seconds of all steps
    _num_steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.start_time = self.clock()
        self._recent = deque(maxlen=WINDOW_STEPS)
        self._total_step_seconds, self._num_steps = 0.0, 0

    def record_step(self, seconds: float, tokens: int) -> None:
        """A step has ended. Measurements and checkpoints between steps are no part of it."""
        self._recent.append((max(seconds, 1e-9), tokens))
        self._total_step_seconds += seconds
        self._num_steps += 1

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the run began, with everything between steps."""
        return self.clock() - self.start_time

    @property
    def step_seconds(self) -> float:
        return sum(seconds for seconds, _ in self._recent) / len(self._recent)

    @property
    def tokens_per_second(self) -> float:
        return sum(tokens for _, tokens in self._recent) / sum(seconds for seconds, _ in self._recent)

    def fit_num_steps(self, step: int, max_total_steps: int, max_seconds: float) -> int:
        """How many steps in all end within `max_seconds` of this run, at most `most`, after `step` steps."""
        left = MARGIN * (max_seconds - self.elapsed_seconds)
        between = (
            max(0.0, self.elapsed_seconds - self._total_step_seconds) / self._num_steps
        )  # measurements and checkpoints, by step
        return min(max_total_steps, step + max(1, int(left / (self.step_seconds + between))))
