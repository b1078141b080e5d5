"""Releases before a step: pending draft KV to write, and requests to preempt."""

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.engine.admission import Admission
from foredraft.engine.preemption import Preemption
from foredraft.request import Request


@dataclass(frozen=True)
class Releases:
    """Work before `Scheduler.schedule`: pending draft KV to write, then requests to preempt."""

    preempted: tuple[Request, ...] = ()
    # Slots whose pending draft KV must be written now, because their pages are shared or freed next.
    unwritten_slots: tuple[int, ...] = ()


NO_RELEASES = Releases()


class ReleasePlanner:
    """Finds the releases that the next batch needs. It changes no request."""

    def __init__(self, admission: Admission, preemption: Preemption) -> None:
        self.admission = admission
        self.preemption = preemption

    def plan(
        self,
        running: Sequence[Request],
        waiting: Sequence[Request],
        allowed: frozenset[Request] | None,
        deferred: frozenset[Request],
    ) -> Releases:
        """Return what has to happen before the next batch.

        Args:
            running: running requests in scheduling order.
            waiting: waiting requests in scheduling order.
            allowed: requests that may run or be admitted. None = all.
            deferred: requests that may not run. If the batch is full, they are preempted for waiting requests.
        """
        if not waiting and self.preemption.has_room(running):  # the common case
            return NO_RELEASES
        admission, cache = self.admission, self.admission.prefix_cache
        num_starting = sum(admission.can_start(request, allowed) for request in waiting) if deferred else 0
        preempted = self.preemption.choose(running, allowed, deferred, num_starting)
        num_free_slots = self.preemption.limits.max_batch - len(running) + len(preempted)
        # Running requests whose full pages the next admitted requests would share, with the draft KV if it is written.
        shared = admission.find_shared_slots(waiting, running, num_free_slots, allowed)
        kept = [r.slot for r in preempted if cache.keeps_pages(r, is_finished=False)]
        if not preempted and not shared:
            return NO_RELEASES
        return Releases(tuple(preempted), tuple({*kept, *shared}))  # a preempted request may share its pages too
