"""Time credit: seconds that drafting has saved and may lose again. It bounds the loss against plain decoding.

A plain step is a step without drafts. Constants in steps are multiples of its measured time. Pure: without a clock.
"""

LOSS_ALLOWANCE = 0.01  # share of the time that may be lost: to probes, to warm-up and to drafts that do not pay
INITIAL_CREDIT_STEPS = 14.0  # credit at the start
MAX_CREDIT_STEPS = 24.0  # upper limit, in plain steps or costliest recent steps with drafts: the longer of the two
MAX_COST_DECAY = 0.99  # factor per step on the cost of the costliest recent step, so that it is forgotten
AMPLE_CREDIT_STEPS = MAX_CREDIT_STEPS / 2  # credit from which the length of a draft is not limited
MIN_AVAILABLE_STEPS = 2.0  # credit that always counts as available, so that short drafts stay possible
MAX_LOAN_STEPS = MAX_CREDIT_STEPS / 2  # upper limit on a loan, so that a wrong prediction costs at most half the credit


class TimeCredit:
    """Account of saved and lost time.

    A step with drafts adds the time that it saves against plain decoding, or subtracts the time that it loses. Every
    step adds LOSS_ALLOWANCE of its time. If the credit is used up, no request may draft. So over a long run at most
    LOSS_ALLOWANCE of the time is lost.

    Attributes:
        seconds: the credit; negative after a loan or a loss.
        plain_step_cost: seconds of a plain step without prompt chunks; 0 = not measured yet.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.plain_step_cost = 0.0
        self._floor = 0.0  # the credit is used up below this; negative from a loan on, until it is repaid
        self._max_step_cost = 0.0  # seconds of the costliest recent step with drafts

    @property
    def is_used_up(self) -> bool:
        return self.seconds < self._floor

    @property
    def available(self) -> float:
        """Seconds that the next step may lose."""
        return max(self.seconds - self._floor, MIN_AVAILABLE_STEPS * self.plain_step_cost)

    @property
    def is_ample(self) -> bool:
        return self.available >= AMPLE_CREDIT_STEPS * self.plain_step_cost

    def grant_loan(self, seconds: float) -> None:
        """Allow the credit to fall below 0 by these seconds, but by MAX_LOAN_STEPS at most."""
        self._floor = -min(seconds, MAX_LOAN_STEPS * self.plain_step_cost)

    def record_unobserved_step(self) -> None:
        """Add the allowance of a plain step whose time was not evaluated."""
        max_credit = MAX_CREDIT_STEPS * self.plain_step_cost
        self.seconds = min(self.seconds + LOSS_ALLOWANCE * self.plain_step_cost, max_credit)

    def record_step(self, plain: float, without_drafts: float, drafting: tuple[float, float] | None) -> None:
        """Update the credit after a step.

        Args:
            plain: predicted seconds of the step without drafts and without prompt chunks.
            without_drafts: predicted seconds of the step without drafts.
            drafting: (measured seconds of the step, seconds that its accepted tokens save later), for a step with
                drafts that the policy chose. None for other steps.
        """
        if not self.plain_step_cost:  # the first step
            self.seconds = INITIAL_CREDIT_STEPS * plain
        self.plain_step_cost = plain
        self.seconds += LOSS_ALLOWANCE * without_drafts
        self._max_step_cost *= MAX_COST_DECAY
        if drafting is not None:
            step_seconds, saved_later = drafting
            self.seconds += without_drafts + saved_later - step_seconds
            self._max_step_cost = max(self._max_step_cost, step_seconds)
        self.seconds = min(self.seconds, MAX_CREDIT_STEPS * max(plain, self._max_step_cost))
        if self.seconds >= 0.0:  # a loan is repaid
            self._floor = 0.0
