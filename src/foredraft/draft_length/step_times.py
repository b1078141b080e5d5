"""Times of finished steps: costs of steps, and the time that drafting has saved.

Pure: no clock. All times are in seconds.
"""

from typing import NamedTuple

from foredraft.draft_length.credit import TimeCredit
from foredraft.draft_length.plain_run import NUM_TRANSITION_STEPS
from foredraft.draft_length.policy import StepReport
from foredraft.draft_length.step_costs import StepCosts

NUM_NEW_DRAFTS = 4  # steps with drafts after a pause that do not change the slowness of the machine


class TimedStep(NamedTuple):
    """A finished step, with what its drafter had to do."""

    report: StepReport
    longest: int  # most nodes that one request was granted; 0 = a plain step
    nodes: int  # draft nodes of all requests
    unread: int  # tokens that the drafter read before it drafted
    newcomers: int  # requests that drafted for the first time
    has_fixed: bool  # drafts of fixed or least length
    num_steps: int = 1  # steps since the last one that was recorded


class StepTimes:
    """Costs and time credit.

    Args:
        costs: costs of steps.
        num_transition_steps: plain steps after drafts, or at the start, whose times change no cost.

    Attributes:
        credit: time that drafting has saved and may lose again.
    """

    def __init__(self, costs: StepCosts, num_transition_steps: int = NUM_TRANSITION_STEPS) -> None:
        self.costs = costs
        self._num_transition_steps = num_transition_steps
        self.credit = TimeCredit()
        self._num_plain = 0  # plain steps since the last draft
        self._num_drafts = 0  # steps with drafts since the last pause

    def record(self, step: TimedStep) -> None:
        """Add a step to costs and credit.

        A plain step soon after drafts, or one of the first, changes no cost. The first drafts after a pause show what
        they cost and not how fast the machine is: caches hold what plain decoding needs.
        """
        was_pause = self._num_plain > self._num_transition_steps
        self._num_plain = 0 if step.longest else self._num_plain + step.num_steps
        if step.longest:
            self._num_drafts = 1 if was_pause else self._num_drafts + 1
        seconds = step.report.step_time
        if step.longest or self._num_plain > self._num_transition_steps:
            is_new = step.longest > 0 and self._num_drafts <= NUM_NEW_DRAFTS
            seconds = self.costs.record(step.report, step.longest, step.nodes, step.unread, step.newcomers, is_new)
        if step.report.outcomes:
            self._update_credit(step, seconds)

    def _update_credit(self, step: TimedStep, seconds: float) -> None:
        """Add the time that a step saved to the time credit, or subtract the time that it lost.

        Args:
            step: the step.
            seconds: time of forward pass and drafter, clipped if it is an outlier.
        """
        outcomes = step.report.outcomes
        plain_step_cost, cost_without_drafts = self.costs.predict_without_drafts(step.report, step.nodes)
        observing = self.costs.estimate_observing(step.report)
        if step.longest and not step.has_fixed:
            # Each accepted token saves one request's share of a later plain step.
            num_accepted = sum([len(o.accepted_nodes) for o in outcomes])
            saved_later = num_accepted * plain_step_cost / len(outcomes)
            self.credit.record_step(plain_step_cost, cost_without_drafts, seconds, saved_later, observing)
        else:
            self.credit.record_step(plain_step_cost, cost_without_drafts, observing=observing)
