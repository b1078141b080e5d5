"""Time credit: seconds that drafting has saved and may lose again. It bounds the loss against plain decoding.

A plain step is a step without drafts. Its cost is predicted, and leaves prompt chunks out. A constant in plain steps is
a multiple of this cost. Pure: without a clock.
"""

from dataclasses import dataclass

# A drafter that observes every step costs this time even if nothing is drafted. Its share counts towards a limit, above
# which the allowance shrinks to the lower one, so that both together stay below the promised 3 %.
MAX_SHARED_LOSS, MIN_LOSS_ALLOWANCE = 0.02, 0.0025
# Upper limit on the credit, in steps of the costlier kind: a plain step, or the costliest recent step with drafts.
MAX_CREDIT_STEPS = 24.0
MAX_COST_DECAY = 0.99  # factor per step on the cost of the costliest recent step, so that it is forgotten
AMPLE_CREDIT_STEPS = MAX_CREDIT_STEPS / 2  # credit, in plain steps, from which the length of a draft is not limited
NEW_LOAD_STEPS = 8.0  # credit, in plain steps, that is kept at a load twice as large or larger
MIN_AVAILABLE_STEPS = 2.0  # plain steps of credit that always count as available, so that short drafts stay possible
MAX_LOAN_STEPS = MAX_CREDIT_STEPS / 2  # upper limit on a loan, in plain steps
MIN_CREDIT_TO_RESUME = 1.0  # credit, in plain steps, above which drafting may resume after a pause
GAIN_WINDOW = 32.0  # steps with drafts over which the gain is averaged


@dataclass(frozen=True)
class CreditTerms:
    """Limits on the time that drafting may lose.

    Attributes:
        allowance: share of the time: for probes, and for drafts that do not pay.
        initial_steps: credit at the start, in plain steps.
        min_allowance: the least that the allowance becomes if the drafter takes long to observe steps.
    """

    allowance: float = 0.01
    initial_steps: float = 10.0
    min_allowance: float = MIN_LOSS_ALLOWANCE


DEFAULT_TERMS = CreditTerms()


class TimeCredit:
    """Account of saved and lost time.

    A step with drafts adds the time that it saves against plain decoding, or subtracts the time that it loses. Every
    recorded step adds the allowance of its predicted time without drafts. If the credit is used up, the policy pauses
    drafting. So over a long run at most the allowance is lost. It is smaller in steps that the drafter observes, if
    that takes more than 1 % of a plain step.

    The credit is used up below 0. A loan lowers this limit for a time: when drafting resumes, the drafter first reads
    the unread tokens, and later steps repay the time. A loan ends with the first step that leaves the credit at 0 or
    above.

    Args:
        terms: limits on the lost time.

    Attributes:
        seconds: the credit; negative if drafting has lost more than the credit held.
        plain_step_cost: predicted seconds of a plain step; 0 = no step was recorded yet.
        observing_share: time that the drafter takes to observe a plain step, as a share of the rest of the step.
    """

    def __init__(self, terms: CreditTerms = DEFAULT_TERMS) -> None:
        self.seconds = 0.0
        self.plain_step_cost = 0.0
        self.observing_share = 0.0
        self._terms = terms
        self._allowance = terms.allowance
        self._floor = 0.0  # the credit is used up below this: minus the seconds of the loan; 0 = no loan
        self._max_step_cost = 0.0  # seconds of the costliest recent step with drafts
        self._recent_saved = self._recent_seconds = 0.0  # of steps with drafts

    @property
    def is_used_up(self) -> bool:
        return self.seconds < self._floor

    @property
    def gain(self) -> float:
        """Time that recent steps with drafts saved, as a share of their time; 0 before the first."""
        return self._recent_saved / self._recent_seconds if self._recent_seconds > 0.0 else 0.0

    @property
    def plain_steps(self) -> float:
        """The credit, in plain steps; 0 before the first."""
        return self.seconds / self.plain_step_cost if self.plain_step_cost else 0.0

    @property
    def available(self) -> float:
        """Seconds that the next step may lose; at least MIN_AVAILABLE_STEPS plain steps."""
        return max(self.seconds - self._floor, MIN_AVAILABLE_STEPS * self.plain_step_cost)

    @property
    def is_ample(self) -> bool:
        return self.available >= AMPLE_CREDIT_STEPS * self.plain_step_cost

    def can_resume_within(self, num_steps: int) -> bool:
        """Return whether so many steps without drafts make the credit exceed MIN_CREDIT_TO_RESUME."""
        income = self._terms.allowance * num_steps * self.plain_step_cost
        return self.seconds + income > MIN_CREDIT_TO_RESUME * self.plain_step_cost

    def grant_loan(self, seconds: float) -> None:
        """Allow the credit to fall below 0 by these seconds, but by MAX_LOAN_STEPS at most."""
        self._floor = -min(seconds, MAX_LOAN_STEPS * self.plain_step_cost)

    def limit_at_larger_load(self) -> None:
        """Drop what was earned at a smaller load, but for NEW_LOAD_STEPS plain steps.

        A long time with few requests could otherwise pay for hundreds of slow steps with many.
        """
        self.seconds = min(self.seconds, NEW_LOAD_STEPS * self.plain_step_cost)

    def record_skipped_step(self, is_observed: bool = True) -> None:
        """Add the allowance of a plain step whose report was not evaluated; `is_observed` as in `record_step`."""
        self.record_step(self.plain_step_cost, self.plain_step_cost, is_observed=is_observed)

    def record_step(
        self,
        plain_step_cost: float,
        cost_without_drafts: float,
        step_seconds: float | None = None,
        saved_later: float = 0.0,
        observing: float = 0.0,
        is_observed: bool = True,
    ) -> None:
        """Update the credit after a step.

        Args:
            plain_step_cost: predicted seconds of the step without drafts and without prompt chunks.
            cost_without_drafts: predicted seconds of the step without drafts.
            step_seconds: measured seconds of a step with drafts whose lengths the policy chose. None = any other step,
                which only adds its allowance.
            saved_later: seconds that the accepted tokens of this step save in later steps.
            observing: predicted seconds in which the drafter observes a plain step; the other costs leave them out.
            is_observed: whether the drafter observed the step. One at rest may not, and then takes no time.
        """
        if observing:
            self.observing_share = observing / max(plain_step_cost, observing)
            shared = max(MAX_SHARED_LOSS - self.observing_share, self._terms.min_allowance)
            self._allowance = min(shared, self._terms.allowance)
        if not self.plain_step_cost:  # the first step
            self.seconds = self._terms.initial_steps * plain_step_cost
        self.plain_step_cost = plain_step_cost
        self.seconds += (self._allowance if is_observed else self._terms.allowance) * cost_without_drafts
        self._max_step_cost *= MAX_COST_DECAY
        if step_seconds is not None:
            saved, fade = cost_without_drafts + saved_later - step_seconds, 1.0 - 1.0 / GAIN_WINDOW
            self.seconds += saved
            self._recent_saved = fade * self._recent_saved + saved
            self._recent_seconds = fade * self._recent_seconds + step_seconds
            self._max_step_cost = max(self._max_step_cost, step_seconds)
        self.seconds = min(self.seconds, MAX_CREDIT_STEPS * max(plain_step_cost, self._max_step_cost))
        if self.seconds >= 0.0:
            self._floor = 0.0  # a loan ends
