"""Prober: starts probes that are due and that the time credit covers. `probes.py` has their schedule."""

from collections.abc import Mapping, Sequence

from foredraft.draft_length.observer import StepObserver
from foredraft.draft_length.policy import DraftCandidate
from foredraft.draft_length.probes import PROBE_NODES, PROBE_STEPS, ProbeSchedule

PROBE_COST_FACTOR = 1.5  # a probe of several requests may cost this many times as much as a probe of one
MAX_HOPELESS_SPEEDUP = 0.95  # predicted speed of drafts over plain decoding below which a costly probe waits longer
MIN_CREDIT_AFTER_PROBE = 2  # plain steps of credit that remain if no node of the probe is accepted


class Prober:
    """Chooses the requests of probes by their cost.

    Args:
        observer: estimates of costs, unread tokens and time credit.

    Attributes:
        schedule: step of the next probe, and the requests of the current one.
    """

    def __init__(self, observer: StepObserver) -> None:
        self.schedule = ProbeSchedule()
        self._observer = observer
        self._credit_before = 0.0  # seconds of the time credit before the current probe or its extension

    def update(
        self, adjustable: Sequence[DraftCandidate], granted: Mapping[int, int], num_pass_tokens: int, speedup: float
    ) -> tuple[int, ...]:
        """Start a probe of requests without drafts if one is due and the credit covers it; end one that is over.

        A probe lasts several consecutive steps, because the time of the first one includes reading the unread tokens.
        Only the later ones measure the cost of a draft.

        Args:
            adjustable: requests whose draft length may change.
            granted: draft nodes by slot without a probe.
            num_pass_tokens: tokens of the forward pass without draft nodes.
            speedup: predicted speed of drafts over plain decoding.

        Returns:
            Slots of the requests of the probe in this step; empty without a probe.
        """
        schedule, step = self.schedule, self._observer.step
        if schedule.slots:
            is_over = schedule.count_step()  # counts the last step, which belonged to the probe
            if not is_over:
                return schedule.slots
            # The probe has paid if the plan now grants drafts to a probed request. If the policy has just decided not
            # to resume drafting, `granted` is empty.
            has_paid = any(granted.get(slot, 0) for slot in schedule.slots)
            if not has_paid and self._has_saved_time() and schedule.extend():
                return schedule.slots
            schedule.finish(step, has_paid, is_hopeless=speedup < MAX_HOPELESS_SPEEDUP)
        schedule.adapt_to_load(len(adjustable), step)
        if step < schedule.next_step:
            return ()
        undrafted = [c for c in adjustable if not granted.get(c.slot, 0)]
        if undrafted:
            self._start(undrafted, num_pass_tokens)
        return schedule.slots

    def _has_saved_time(self) -> bool:
        """Return whether the steps of the probe took less time than plain steps.

        Then the probe costs nothing, and a few more steps show whether the estimates are too low.
        """
        self._observer.settle()
        before, self._credit_before = self._credit_before, self._observer.credit.seconds
        return self._credit_before > before

    def _start(self, candidates: Sequence[DraftCandidate], num_pass_tokens: int) -> None:
        """Start a probe of as many of these requests as the cost permits, if the credit covers it.

        If none is ready, the probe waits, and the drafter observes requests that start until then.
        """
        self._observer.settle()
        ready = [c.slot for c in candidates if c.is_ready]
        slots = ready or [c.slot for c in candidates]
        credit = self._observer.credit
        self._observer.unread.sort_by_last_draft(slots, self._observer.step)
        max_cost = PROBE_COST_FACTOR * self._estimate_cost(slots[:1], num_pass_tokens)
        count = 1
        while count < len(slots) and self._estimate_cost(slots[: 2 * count], num_pass_tokens) <= max_cost:
            count *= 2
        cost = self._estimate_cost(slots[:count], num_pass_tokens)
        if credit.seconds <= cost + MIN_CREDIT_AFTER_PROBE * credit.plain_step_cost:
            self.schedule.defer(self._observer.step)
        elif ready:
            self.schedule.start(tuple(slots[:count]), cost / credit.plain_step_cost)
            self._credit_before = credit.seconds
        else:
            self.schedule.wait(self._observer.step)

    def _estimate_cost(self, slots: Sequence[int], num_pass_tokens: int) -> float:
        """Return the seconds that a probe of these requests adds if none of its nodes is accepted.

        While other requests draft, the drafter runs in any case. The time that it takes for a few more nodes is then
        neglected.
        """
        costs, nodes = self._observer.costs, PROBE_NODES * len(slots)
        per_step = costs.planner.estimate_added_pass_time(num_pass_tokens, nodes)
        if not self._observer.is_drafting:
            per_step += costs.draft_cost.predict(requests=0, longest=PROBE_NODES, nodes=nodes)
        return PROBE_STEPS * per_step + self._observer.estimate_catch_up(slots)
