"""Runs of plain steps that measure the cost of plain decoding while requests draft.

The first plain steps after drafts are slower than plain decoding is, by up to a half on small models: caches hold what
drafts need. The excess falls by about a fifth per step. Only the later steps of a run count: those after the tenth if
drafts are predicted to gain little, so that a tenth of a step decides, and earlier ones if they gain more.

The first steps of an engine are slower too, and plain steps are measured before drafts. Drafts would seem to save more
than they do. So the first run comes early and is longer. At a larger load the times of plain steps are those of passes
with drafts for fewer requests, so a run begins at once.
"""

from foredraft.draft_length.intervals import MAX_PLAIN_INTERVAL

MIN_TRANSITION_STEPS, MAX_TRANSITION_STEPS = 2, 10  # plain steps after drafts whose times do not count
TRANSITION_GAIN = 2.0  # predicted gain times transition steps
NUM_MEASURED, NUM_FIRST_MEASURED = 2, 6  # steps of a run that count: of any run, and of the first one
NEW_LOAD_STEPS = MIN_TRANSITION_STEPS + NUM_FIRST_MEASURED  # of a run at a larger load
FIRST_INTERVAL = 24  # steps with drafts before the first run; the limit doubles with every run
# A predicted gain at which drafts pay even if plain decoding takes 40 % less time than it seems to, as at the start.
CLEAR_GAIN = 0.7
CLEAR_INTERVAL = 96  # steps with drafts before the first run then


def count_transition_steps(gain: float) -> int:
    """Return the number of steps of a run that do not count, for a predicted gain of drafts."""
    if gain * MAX_TRANSITION_STEPS <= TRANSITION_GAIN:
        return MAX_TRANSITION_STEPS
    return max(round(TRANSITION_GAIN / gain), MIN_TRANSITION_STEPS)


def count_run_steps(gain: float) -> int:
    """Return the number of steps of a run that is not the first, for a predicted gain of drafts."""
    return count_transition_steps(gain) + NUM_MEASURED


class PlainRun:
    """Steps that are left of the current run, and the interval until the next.

    Attributes:
        num_transition_steps: steps of the latest run whose times do not count.
    """

    def __init__(self) -> None:
        self.num_transition_steps = MIN_TRANSITION_STEPS
        self._left = 0
        self._max_interval = FIRST_INTERVAL
        self._load = 0  # reference load, in requests whose draft length may change

    def adapt_to_load(self, load: int) -> bool:
        """Begin anew if the load is at least twice or less than half of the reference, and return whether it grew.

        Args:
            load: requests whose draft length may change.
        """
        if self._is_load_similar(load):
            return False
        has_grown = 0 < self._load < load
        self._begin(MIN_TRANSITION_STEPS, NUM_FIRST_MEASURED if has_grown else 0)
        self._load, self._max_interval = load, FIRST_INTERVAL
        return has_grown

    def take_step(
        self, steps_since_plain: int, interval: float, gain: float, is_typical: bool = True, is_disturbed: bool = False
    ) -> bool:
        """Return whether the next step belongs to a run.

        Args:
            steps_since_plain: steps with drafts since the last run or pause.
            interval: of them between two runs, for a load that is not new.
            gain: predicted gain of drafts.
            is_typical: the pass has the size of a plain step. A run waits for such a step, MAX_PLAIN_INTERVAL at most.
            is_disturbed: the step is soon after a prompt.
        """
        is_clear = gain >= CLEAR_GAIN
        max_interval = max(self._max_interval, CLEAR_INTERVAL) if is_clear else self._max_interval
        interval = min(interval, max_interval) if is_typical else MAX_PLAIN_INTERVAL
        if not self._left and steps_since_plain >= interval:
            is_first = self._max_interval == FIRST_INTERVAL
            self._begin(count_transition_steps(gain), NUM_FIRST_MEASURED if is_first and not is_clear else NUM_MEASURED)
            self._max_interval *= 2
        return self._take(is_disturbed)

    def take_next(self, load: int, is_disturbed: bool = False) -> bool:
        """Return whether the next step belongs to a run that has begun; False at another load (`adapt_to_load`).

        Args:
            load: requests whose draft length may change.
            is_disturbed: the step is soon after a prompt.
        """
        return self._is_load_similar(load) and self._take(is_disturbed)

    def _is_load_similar(self, load: int) -> bool:
        return self._load / 2 <= load < self._load * 2

    def _take(self, is_disturbed: bool) -> bool:
        """Return whether a step is left, and take it. A step that is disturbed is none of those that count."""
        if not self._left:
            return False
        if not is_disturbed or self._left > NUM_MEASURED:
            self._left -= 1
        return True

    def stop(self) -> None:
        """End the current run, because drafting is paused: the plain steps of the pause measure the same."""
        self._left = 0

    def _begin(self, num_transition_steps: int, num_measured: int) -> None:
        """Begin a run of transition steps and measured steps; none if nothing is measured."""
        self.num_transition_steps = num_transition_steps
        self._left = num_transition_steps + num_measured if num_measured else 0
