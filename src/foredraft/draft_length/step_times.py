"""Times of finished steps: costs of steps, and the time that drafting has saved.

Pure: no clock. All times are in seconds.
"""

from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from foredraft.draft_length.credit import DEFAULT_TERMS, CreditTerms, TimeCredit
from foredraft.draft_length.plain_run import MIN_TRANSITION_STEPS
from foredraft.draft_length.policy import StepReport
from foredraft.draft_length.prompt_monitor import PromptMonitor
from foredraft.draft_length.step_costs import StepCosts

OUTLIER_FACTOR = 1.5  # a time of a merged step counts at most as this multiple of their median
NUM_NEW_DRAFTS = 4  # steps with drafts after a pause that do not change the slowness of the machine
NUM_NEW_PLAIN = 16  # the same for plain steps after drafts
MAX_SIZES = 2  # sizes of steps that waited together whose times change costs: updating costs takes longest


class TimedStep(NamedTuple):
    """A finished step, with what its drafter had to do."""

    report: StepReport
    longest: int  # most nodes that one request was granted; 0 = a plain step
    nodes: int  # draft nodes of all requests
    unread: int  # tokens that the drafter read before it drafted
    newcomers: int  # requests that drafted for the first time
    has_fixed: bool  # drafts of fixed or least length
    num_accepted: float  # accepted draft nodes of all requests
    num_steps: int = 1  # steps since the last one that was recorded
    num_equal: int = 1  # steps of this size that it stands for
    is_disturbed: bool = False  # soon after a rare prompt, so its time is not typical

    @property
    def size(self) -> tuple[int, ...]:
        """Whatever the cost of the step depends on, but for the context, which hardly changes between two steps."""
        report = self.report
        return (
            report.num_requests, report.num_pass_tokens, report.num_logit_rows, len(report.outcomes),
            report.is_observed, self.longest, self.nodes, self.unread, self.newcomers, self.has_fixed,
            self.is_disturbed,
        )  # fmt: skip


def merge_equal_steps(steps: Sequence[TimedStep]) -> list[TimedStep]:
    """Replace steps with drafts of one size by one with their mean times, which is evaluated in their place.

    Evaluating a step takes longer than all else that is done for it. Times have a long tail, so a median would make
    sizes that occur often seem cheaper than those that occur once, whose times are evaluated as they are.
    """
    groups = dict[tuple[int, ...], list[TimedStep]]()
    for step in steps:
        groups.setdefault(step.size, []).append(step)
    return [_merge(group) if len(group) > 1 else group[0] for group in groups.values()]


def _merge(steps: Sequence[TimedStep]) -> TimedStep:
    last = steps[-1]
    report = last.report._replace(
        draft_time=_compute_clipped_mean([step.report.draft_time for step in steps]),
        step_time=_compute_clipped_mean([step.report.step_time for step in steps]),
    )
    num_accepted = sum([step.num_accepted for step in steps]) / len(steps)
    return last._replace(report=report, num_accepted=num_accepted, num_equal=len(steps))


def _compute_clipped_mean(times: Sequence[float]) -> float:
    most = OUTLIER_FACTOR * median(times)
    return fmean([min(seconds, most) for seconds in times])


class StepTimes:
    """Costs and time credit.

    Args:
        costs: costs of steps.
        num_transition_steps: plain steps after drafts, or at the start, whose times change no cost.
        terms: limits on the lost time.

    Attributes:
        num_transition_steps: the same for the following steps; runs of plain steps differ (`plain_run.py`).
        credit: time that drafting has saved and may lose again.
        prompts: steps since the last prompt.
    """

    def __init__(
        self,
        costs: StepCosts,
        num_transition_steps: int = MIN_TRANSITION_STEPS,
        terms: CreditTerms = DEFAULT_TERMS,
    ) -> None:
        self.costs = costs
        self.num_transition_steps = num_transition_steps
        self.credit = TimeCredit(terms)
        self.prompts = PromptMonitor()
        self._num_plain = 0  # plain steps since the last draft
        self._num_drafts = 0  # steps with drafts since the last pause
        self._turn = 0  # chooses among steps that waited together (`record_all`)

    @property
    def num_transition_left(self) -> int:
        """Number of plain steps from now on that change no cost, if no draft comes before them."""
        return max(self.num_transition_steps - self._num_plain, 0)

    def record_all(self, steps: Sequence[TimedStep]) -> None:
        """Add steps of different sizes that waited together.

        All of them change the credit. The costs learn from the size that occurred most often, and from one of the
        others in turn.
        """
        if len(steps) <= MAX_SIZES:
            chosen = set(range(len(steps)))
        else:
            most = max(range(len(steps)), key=lambda i: steps[i].num_equal)
            self._turn += 1
            chosen = {most, (most + 1 + self._turn % (len(steps) - 1)) % len(steps)}
        for i, step in enumerate(steps):
            self.record(step, changes_costs=i in chosen)

    def record(self, step: TimedStep, changes_costs: bool = True) -> None:
        """Add a step to the credit, and to the costs unless `changes_costs` is False.

        A plain step soon after drafts, or one of the first, changes no cost. The first drafts after a pause show what
        they cost and not how fast the machine is: caches hold what plain decoding needs. The first plain steps after
        drafts show the same of plain decoding. If they seemed to show a faster machine, drafts would seem faster too.

        A step soon after a rare prompt changes no cost either. It changes the credit as if it had taken what is
        predicted, because a step without drafts would have been as slow.
        """
        if step.longest and self._num_plain > self.num_transition_steps:
            self._num_drafts = 0
        has_drafted = self._num_drafts > 0
        self._num_plain = 0 if step.longest else self._num_plain + step.num_steps
        is_new = self._num_drafts < NUM_NEW_DRAFTS if step.longest else has_drafted and self._num_plain <= NUM_NEW_PLAIN
        self._num_drafts += step.num_equal if step.longest else 0
        seconds = step.report.step_time
        if step.is_disturbed:
            seconds = self.costs.predict(step.report, step.longest, step.nodes, step.unread, step.newcomers)
        elif not changes_costs:
            seconds = self.costs.clip(step.report, step.longest, step.nodes, step.unread, step.newcomers)
        elif step.longest or self._num_plain > self.num_transition_steps:
            seconds = self.costs.record(step.report, step.longest, step.nodes, step.unread, step.newcomers, is_new)
        if step.report.outcomes:
            self._update_credit(step, seconds)

    def _update_credit(self, step: TimedStep, seconds: float) -> None:
        """Add the time that a step saved to the time credit, or subtract the time that it lost.

        Args:
            step: the step.
            seconds: time of forward pass and drafter, clipped if it is an outlier.
        """
        plain_step_cost, cost_without_drafts = self.costs.predict_without_drafts(step.report, step.nodes)
        observing = self.costs.estimate_observing(step.report)
        is_chosen = step.longest > 0 and not step.has_fixed
        # Each accepted token saves one request's share of a later plain step.
        saved_later = step.num_accepted * plain_step_cost / len(step.report.outcomes) if is_chosen else 0.0
        step_seconds = seconds if is_chosen else None
        for _ in range(step.num_equal):
            self.credit.record_step(
                plain_step_cost, cost_without_drafts, step_seconds, saved_later, observing, step.report.is_observed
            )
