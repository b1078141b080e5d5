"""Runs of plain steps that measure the cost of plain decoding while requests draft.

The first plain steps after drafts are slower than plain decoding is, by up to a half on small models: caches hold what
drafts need. Only the later steps of a run count.
"""

NUM_TRANSITION_STEPS = 2  # plain steps after drafts whose times do not count
RUN_STEPS = NUM_TRANSITION_STEPS + 2


class PlainRun:
    """Steps that are left of the current run."""

    def __init__(self) -> None:
        self._left = 0

    def take_step(self, steps_since_plain: int, interval: float) -> bool:
        """Return whether the next step belongs to a run; a run begins after an interval of steps with drafts."""
        if not self._left and steps_since_plain >= interval:
            self._left = RUN_STEPS
        if not self._left:
            return False
        self._left -= 1
        return True
