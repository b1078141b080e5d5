"""How fast a run goes now, and how many steps fit into the time it has."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]
WINDOW = 20  # steps that the mean is over: a stall is forgotten after them
FIT_EVERY = 10  # steps of this run after which the number of all steps is fitted to the time, again and again
MARGIN = 0.98  # of the time left that is planned for


@dataclass
class Timing:
    """The latest steps of this run: seconds and tokens of each."""

    clock: Clock = time.monotonic
    began: float = field(init=False)
    _recent: deque[tuple[float, int]] = field(init=False)
    _stepping: float = field(init=False)  # seconds of all steps
    _count: int = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()
        self._recent = deque(maxlen=WINDOW)
        self._stepping, self._count = 0.0, 0

    def note(self, seconds: float, tokens: int) -> None:
        """A step has ended. Measurements and checkpoints between steps are no part of it."""
        self._recent.append((max(seconds, 1e-9), tokens))
        self._stepping += seconds
        self._count += 1

    @property
    def spent(self) -> float:
        """Seconds since the run began, with everything between steps."""
        return self.clock() - self.began

    @property
    def step_seconds(self) -> float:
        return sum(seconds for seconds, _ in self._recent) / len(self._recent)

    @property
    def tokens_per_second(self) -> float:
        return sum(tokens for _, tokens in self._recent) / sum(seconds for seconds, _ in self._recent)

    def fit(self, step: int, most: int, max_seconds: float) -> int:
        """How many steps in all end within `max_seconds` of this run, at most `most`, after `step` steps."""
        left = MARGIN * (max_seconds - self.spent)
        between = max(0.0, self.spent - self._stepping) / self._count  # measurements and checkpoints, by step
        return min(most, step + max(1, int(left / (self.step_seconds + between))))
