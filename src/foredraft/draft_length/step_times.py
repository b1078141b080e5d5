"""Times of finished steps: costs and time credit are updated from several of them at once.

Pure: no clock. All times are in seconds.
"""

from typing import NamedTuple

from foredraft.draft_length.credit import TimeCredit
from foredraft.draft_length.policy import StepReport
from foredraft.draft_length.step_costs import StepCosts

MAX_WAITING = 4  # steps that wait at most
MAX_WAITING_COST = 2.0  # plain steps that a step may take to wait: four of them then lose little of the time credit


class TimedStep(NamedTuple):
    """A finished step, with what its drafter had to do."""

    report: StepReport
    longest: int  # most nodes that one request was granted; 0 = a plain step
    nodes: int  # draft nodes of all requests
    unread: int  # tokens that the drafter read before it drafted
    newcomers: int  # requests that drafted for the first time
    has_fixed: bool  # drafts of fixed or least length


class StepTimes:
    """Costs and time credit, and the steps that have not been added to them.

    The pass of the target empties the caches, so the code below is slow when it runs once per step. While drafting
    pays, nothing depends on the last few steps, and they wait until there are MAX_WAITING of them.

    Args:
        costs: costs of steps.

    Attributes:
        credit: time that drafting has saved and may lose again.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.credit = TimeCredit()
        self._waiting: list[TimedStep] = []

    def record(self, step: TimedStep, can_wait: bool) -> None:
        """Add a step. It waits if it may, the time credit is ample, and the step was short.

        Args:
            step: the step.
            can_wait: whether no decision depends on it at once.
        """
        self._waiting.append(step)
        longest_seconds = MAX_WAITING_COST * self.credit.plain_step_cost * self.costs.slowdown
        has_waited = len(self._waiting) == MAX_WAITING or step.report.step_time > longest_seconds
        if has_waited or not can_wait or not self.credit.is_ample:
            self.settle()

    def settle(self) -> None:
        """Add the steps that wait to costs and credit."""
        for step in self._waiting:
            seconds = self.costs.record(step.report, step.longest, step.nodes, step.unread, step.newcomers)
            if step.report.outcomes:
                self._update_credit(step, seconds)
        self._waiting.clear()

    def _update_credit(self, step: TimedStep, seconds: float) -> None:
        """Add the time that a step saved to the time credit, or subtract the time that it lost.

        Args:
            step: the step.
            seconds: time of forward pass and drafter, clipped if it is an outlier.
        """
        outcomes = step.report.outcomes
        plain_step_cost, cost_without_drafts = self.costs.predict_without_drafts(step.report, step.nodes)
        observing = self.costs.draft_cost.predict(requests=len(outcomes), longest=0, nodes=0)
        if step.longest and not step.has_fixed:
            # Each accepted token saves one request's share of a later plain step.
            num_accepted = sum([len(o.accepted_nodes) for o in outcomes])
            saved_later = num_accepted * plain_step_cost / len(outcomes)
            self.credit.record_step(plain_step_cost, cost_without_drafts, seconds, saved_later, observing)
        else:
            self.credit.record_step(plain_step_cost, cost_without_drafts, observing=observing)
