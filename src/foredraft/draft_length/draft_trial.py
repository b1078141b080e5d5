"""Trial: a few more drafts after the warm-up, if they do not seem to pay yet.

Five drafts say little about the acceptance rate, and the first tokens of an output are harder than later ones. A pause
lasts for 32 steps at least, so drafts of few requests go on for a while, as long as they have lost little.
"""

TRIAL_STEPS = 8
TRIAL_NODES = 3  # draft nodes per request and step
MAX_TRIAL_REQUESTS = 2
MIN_TRIAL_CREDIT = 7.0  # time credit, in plain steps, below which the trial ends


class DraftTrial:
    """Steps of the trial that are left. It ends as soon as drafts pay, and does not begin again."""

    def __init__(self) -> None:
        self._left = TRIAL_STEPS

    def take_step(self, pays: bool, num_requests: int, credit: float) -> bool:
        """Return whether the next step belongs to the trial.

        Args:
            pays: drafts pay according to the plan.
            num_requests: requests whose draft length may change.
            credit: time credit, in plain steps.
        """
        if pays or num_requests > MAX_TRIAL_REQUESTS or credit < MIN_TRIAL_CREDIT:
            self._left = 0
        if not self._left:
            return False
        self._left -= 1
        return True
