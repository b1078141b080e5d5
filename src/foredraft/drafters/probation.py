"""Whether a drafter is used at present: one that fails too often rests for a while, and is then tried again."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

log = logging.getLogger(__name__)
Clock = Callable[[], float]
Kind = Literal["raised", "malformed", "slow", "mutated"]
KINDS: tuple[Kind, ...] = ("raised", "malformed", "slow", "mutated")
MAX_FAILURES = 3  # until it rests
SOUND = 20  # proposals in a row without a failure that clear the count
FIRST_REST, LONGEST_REST = 5.0, 300.0  # seconds; every rest is twice as long as the one before
PENANCE = 20  # times its own duration that a failed call counts: slow ones cost a twentieth of the time at most

TIMEOUT = 5.0  # seconds one proposal may take
LEAST = 1.0  # seconds that are never too long for a proposal
RATIO = 50  # passes of the target that a proposal may take
FEWEST = 8  # passes seen until their median counts
FOLLOW = 1.05  # factor by which the running median moves towards every pass


class Pace:
    """How long a proposal may take: at most `timeout` seconds, and no more than RATIO ordinary passes of the target.

    What the target took to read prompts since the last proposal comes on top, because the next proposal may read the
    same prompts. Until FEWEST passes were seen (first proposals compile and allocate) `timeout` alone counts.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self._num_passes = 0
        self._median = 0.0  # seconds of a pass without prompts, about
        self._read = 0.0  # seconds of passes with prompts since the last proposal

    def passed(self, seconds: float, has_prompt: bool) -> None:
        """Note what the target took for a pass."""
        if has_prompt:
            self._read += seconds
            return
        self._num_passes += 1
        if self._num_passes == 1:
            self._median = seconds
        elif seconds != self._median:
            self._median *= FOLLOW if seconds > self._median else 1 / FOLLOW

    def _limit(self) -> float:
        """Seconds that the proposal just made may have taken."""
        read, self._read = self._read, 0.0
        most = self.timeout
        if self._num_passes >= FEWEST:
            most = min(most, max(LEAST, RATIO * self._median))
        return most + read

    def proposed(self, seconds: float) -> float | None:
        """Note a proposal. Returns the limit if it took longer than that."""
        if seconds <= min(LEAST, self.timeout):  # the common case
            self._read = 0.0
            return None
        most = self._limit()
        return most if seconds > most else None


class Probation:
    """Failures of one drafter, by kind, and what follows from them.

    MAX_FAILURES failures begin a rest of FIRST_REST seconds. After a rest one more failure begins the next, twice as
    long, up to LONGEST_REST. SOUND proposals in a row without a failure clear the count. A rest ends in `wake` alone,
    so that within a step the answer of `is_resting` changes at most once, to True.
    """

    def __init__(self, name: str = "", clock: Clock = time.perf_counter) -> None:
        self.name = name
        self.failures: Counter[str] = Counter()  # since the beginning
        self.reason = ""  # of the last failure
        self.is_resting = False
        self.pace = Pace()
        self.clock = clock
        self._num_counted = 0  # failures that were not cleared
        self._num_rests = 0  # that were not cleared
        self._num_sound = 0  # proposals since the last failure
        self._cleared_from = self._rests_until = 0.0

    def failed(self, kind: Kind, what: str, seconds: float = 0.0) -> None:
        """Count a failure, and begin a rest if there were too many. seconds: what the failed call took."""
        self.failures[kind] += 1
        self.reason = what
        self._num_sound = 0
        self._num_counted += 1
        self._cleared_from = self.clock() + PENANCE * seconds
        rest = ""
        if self._num_counted >= MAX_FAILURES and not self.is_resting:
            length = min(max(FIRST_REST * 2**self._num_rests, PENANCE * seconds), LONGEST_REST)
            self._num_rests = min(self._num_rests + 1, 16)
            self._rests_until = self.clock() + length
            self.is_resting = True
            rest = f"; it rests for {length:.0f} s"
        log.warning("the drafter%s failed (%s, %s)%s", self.name and f" {self.name}", kind, what, rest or "; ignored")

    def took(self, seconds: float, is_timed: bool = True) -> None:
        """Count a proposal without any other failure, and whether it was in time."""
        most = self.pace.proposed(seconds) if is_timed else None
        if most is not None:
            self.failed("slow", f"propose: {seconds:.1f} s, and {most:.1f} s are allowed", seconds)
        elif self._num_counted:
            self._num_sound += 1
            if self._num_sound >= SOUND and self.clock() >= self._cleared_from:
                self._num_counted = self._num_rests = 0

    def wake(self) -> None:
        """Between two steps: end a rest that is over."""
        if self.is_resting and self.clock() >= self._rests_until:
            self.is_resting = False
            self._num_counted = MAX_FAILURES - 1
            self._num_sound = 0
            log.info("the drafter%s is tried again", self.name and f" {self.name}")
