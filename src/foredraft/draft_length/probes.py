"""Schedule of probes: short drafts of requests that have none, to measure their acceptance again.

Pure: steps are counted by the caller. The load is the number of requests whose draft length may change.
"""

from collections.abc import Sequence

PROBE_NODES = 2  # draft nodes per request and step
PROBE_STEPS = 4  # consecutive steps of a probe
MAX_EXTENSIONS = 3  # a probe that saves time goes on so many times for as many steps again
MIN_PROBE_INTERVAL = 32  # steps between probes; doubles after each probe that did not pay
MAX_PROBE_INTERVAL = 256  # steps
MAX_PROBE_SHARE = 0.005  # of the time, which probes take at most while drafts are far from paying
DEFERRAL = 16  # steps until a probe that the credit does not cover is considered again, which takes time by itself
WAIT = 8  # steps until a probe that waits for a request that is ready is considered again


class ProbeSchedule:
    """Step of the next probe, and the requests of the current one.

    Attributes:
        slots: requests of the current probe; empty = no probe runs.
        next_step: index of the first step in which the next probe may start.
        is_waiting: whether a probe is due and no request is ready to draft.
    """

    def __init__(self) -> None:
        self.slots: tuple[int, ...] = ()
        self.next_step = 0
        self.is_waiting = False
        self._steps_left = 0  # steps of the current probe that are not finished
        self._extensions_left = 0
        self._interval = MIN_PROBE_INTERVAL  # in steps
        self._least_interval = 0  # in steps, from the price of the current probe
        self._reference_load = 0  # load that later loads are compared with

    @property
    def is_in_first_step(self) -> bool:
        """Whether the current step is the first of a probe, or of its extension."""
        return bool(self.slots) and self._steps_left == PROBE_STEPS

    def is_due(self, step: int) -> bool:
        """Return whether a probe runs, or may start now or as soon as a request is ready."""
        return bool(self.slots) or self.is_waiting or step >= self.next_step

    def is_load_similar(self, load: int) -> bool:
        """Return whether the load is more than half and less than twice the reference load."""
        return self._reference_load / 2 < load < self._reference_load * 2

    def adapt_to_load(self, load: int, step: int) -> None:
        """If the load has halved or doubled, set the reference load. With half the load, probes come twice as often.

        Acceptance does not depend on the load, and a plan for the new load needs no probe. But drafts pay more often
        with fewer requests.
        """
        if self.is_load_similar(load):
            return
        if load < self._reference_load:
            self._interval = max(self._interval // 2, MIN_PROBE_INTERVAL)
            self.next_step = min(self.next_step, step + self._interval)
        self._reference_load = load

    def start(self, slots: tuple[int, ...], price: float) -> None:
        """Start a probe of these requests in the current step.

        Args:
            slots: the requests.
            price: plain steps that the probe adds if no node is accepted.
        """
        self.slots, self._steps_left, self._extensions_left = slots, PROBE_STEPS, MAX_EXTENSIONS
        self.is_waiting, self._least_interval = False, round(price / MAX_PROBE_SHARE)

    def wait(self, step: int) -> None:
        """Consider the probe again after some steps, in which requests may become ready."""
        self.next_step, self.is_waiting = step + WAIT, True

    def defer(self, step: int) -> None:
        """Consider the probe that is due again after some steps. The interval stays."""
        self.next_step, self.is_waiting = step + DEFERRAL, False

    def count_step(self) -> bool:
        """Count a finished step of the current probe. Returns whether the probe is over."""
        self._steps_left -= 1
        return self._steps_left == 0

    def extend(self) -> bool:
        """Let the probe that is over go on, because it has saved time. Returns whether it may."""
        if not self._extensions_left:
            return False
        self._steps_left, self._extensions_left = PROBE_STEPS, self._extensions_left - 1
        return True

    def finish(self, step: int, has_paid: bool, is_hopeless: bool = False) -> None:
        """End the current probe and set the step of the next one. The interval doubles unless the probe has paid.

        Args:
            step: the next step.
            has_paid: a probed request drafts from now on.
            is_hopeless: drafts are far from paying, so the next probe waits until its price is a small share.
        """
        self._interval = MIN_PROBE_INTERVAL if has_paid else min(2 * self._interval, MAX_PROBE_INTERVAL)
        self.postpone(step)
        if is_hopeless and not has_paid:
            self.next_step = max(self.next_step, step + self._least_interval)

    def postpone(self, step: int) -> None:
        """End the current probe, if there is one, and start the next one an interval after this step."""
        self.slots, self.next_step, self.is_waiting = (), step + self._interval, False

    def reset_interval(self) -> None:
        """Set the interval to its minimum, because drafting has resumed."""
        self._interval = MIN_PROBE_INTERVAL

    def forget(self, slots: Sequence[int]) -> None:
        """End the current probe if one of its requests is among these slots. Another may start in the next step."""
        if not set(self.slots).isdisjoint(slots):
            self.slots = ()
