"""Backoff of a failing drafter: after repeated failures it is quarantined for a time, then tried again."""

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

log = logging.getLogger(__name__)
Clock = Callable[[], float]
FailureKind = Literal["raised", "malformed", "slow", "mutated"]
FAILURE_KINDS: tuple[FailureKind, ...] = ("raised", "malformed", "slow", "mutated")
MAX_FAILURES = 3  # failures before a quarantine
SUCCESSES_TO_CLEAR = 20  # consecutive proposals without a failure that clear the count
FIRST_QUARANTINE, MAX_QUARANTINE = 5.0, 300.0  # seconds; each quarantine is twice as long as the last
MAX_DOUBLINGS = 16  # keeps the power of two finite; MAX_QUARANTINE is reached before
# quarantine after a failed call, in multiples of its duration, so slow calls take at most 1/20 of the time
SLOW_CALL_FACTOR = 20

TIMEOUT = 5.0  # seconds one proposal may take
MIN_TIMEOUT = 1.0  # seconds that a proposal may always take
MAX_PASS_RATIO = 50  # proposal limit in median passes of the target
MIN_PASSES = 8  # passes before their median is used
MEDIAN_STEP = 1.05  # factor by which the running median moves towards each new value


class ProposalTimeLimit:
    """Time limit of a proposal: at most `timeout` seconds and MAX_PASS_RATIO median passes of the target.

    The target's time for prompts since the last proposal is added, because the next proposal may read the same prompts.
    Before MIN_PASSES passes only `timeout` limits, because the first proposals compile and allocate.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self._num_passes = 0
        self._median_seconds = 0.0  # running median of passes without prompt chunks
        self._prompt_seconds = 0.0  # of passes with prompt chunks since the last proposal

    def record_pass(self, seconds: float, has_prompt: bool) -> None:
        """Record the seconds of a forward pass of the target."""
        if has_prompt:
            self._prompt_seconds += seconds
            return
        self._num_passes += 1
        if self._num_passes == 1:
            self._median_seconds = seconds
        elif seconds != self._median_seconds:
            self._median_seconds *= MEDIAN_STEP if seconds > self._median_seconds else 1 / MEDIAN_STEP

    def _compute_limit(self) -> float:
        """Compute the limit of the last proposal in seconds."""
        prompt_seconds, self._prompt_seconds = self._prompt_seconds, 0.0
        limit = self.timeout
        if self._num_passes >= MIN_PASSES:
            limit = min(limit, max(MIN_TIMEOUT, MAX_PASS_RATIO * self._median_seconds))
        return limit + prompt_seconds

    def check_proposal(self, seconds: float) -> float | None:
        """Record the seconds of a proposal. Returns the limit if it was exceeded, else None."""
        if seconds <= min(MIN_TIMEOUT, self.timeout):  # the common case
            self._prompt_seconds = 0.0
            return None
        limit = self._compute_limit()
        return limit if seconds > limit else None


class FailureBackoff:
    """Failures of one drafter by kind, and its quarantine.

    MAX_FAILURES failures begin a quarantine of FIRST_QUARANTINE seconds. After it one more failure begins the next,
    twice as long, up to MAX_QUARANTINE. SUCCESSES_TO_CLEAR consecutive successes clear the count. A quarantine ends
    only in `release_if_due`, so within a step `is_quarantined` changes at most once, to True.
    """

    def __init__(self, name: str = "", clock: Clock = time.perf_counter) -> None:
        self.name = name
        self.failures: Counter[str] = Counter()  # by kind, never cleared
        self.reason = ""  # detail of the last failure
        self.is_quarantined = False
        self.time_limit = ProposalTimeLimit()
        self.clock = clock
        self._num_uncleared = 0  # failures since the count was cleared
        self._num_quarantines = 0  # quarantines since the count was cleared
        self._num_successes = 0  # proposals since the last failure
        self._clear_after = self._quarantined_until = 0.0  # times of the clock, in seconds

    def record_failure(self, kind: FailureKind, detail: str, seconds: float = 0.0) -> None:
        """Count a failure, and begin a quarantine after too many. `seconds`: duration of the failed call."""
        self.failures[kind] += 1
        self.reason = detail
        self._num_successes = 0
        self._num_uncleared += 1
        self._clear_after = self.clock() + SLOW_CALL_FACTOR * seconds
        note = ""
        if self._num_uncleared >= MAX_FAILURES and not self.is_quarantined:
            length = min(max(FIRST_QUARANTINE * 2**self._num_quarantines, SLOW_CALL_FACTOR * seconds), MAX_QUARANTINE)
            self._num_quarantines = min(self._num_quarantines + 1, MAX_DOUBLINGS)
            self._quarantined_until = self.clock() + length
            self.is_quarantined = True
            note = f"; quarantined for {length:.0f} s"
        log.warning("the drafter%s failed (%s, %s)%s", self.name and f" {self.name}", kind, detail, note or "; ignored")

    def record_call(self, seconds: float, is_timed: bool = True) -> None:
        """Record a proposal that did not fail otherwise; it fails if it took too long."""
        limit = self.time_limit.check_proposal(seconds) if is_timed else None
        if limit is not None:
            self.record_failure("slow", f"propose: {seconds:.1f} s, and {limit:.1f} s are allowed", seconds)
        elif self._num_uncleared:
            self._num_successes += 1
            if self._num_successes >= SUCCESSES_TO_CLEAR and self.clock() >= self._clear_after:
                self._num_uncleared = self._num_quarantines = 0

    def release_if_due(self) -> None:
        """End a quarantine that is over. Call between steps."""
        if self.is_quarantined and self.clock() >= self._quarantined_until:
            self.is_quarantined = False
            self._num_uncleared = MAX_FAILURES - 1
            self._num_successes = 0
            log.info("the drafter%s is tried again", self.name and f" {self.name}")
