"""Warm-up: the first steps of a policy, which measure costs."""

NODES = (0,) * 8 + (1, 1, 3, 3, 3)  # draft nodes per request: entry i is for step i
# The first steps of an engine are slow. With few requests drafts pay nearly always, and an output may be short, so
# fewer of them are plain.
FEW_REQUESTS, FEW_PLAIN_STEPS = 2, 4
# A negative credit ends the warm-up, but not before this many steps: the first draft is slow, because the drafter reads
# the prompt.
MIN_STEPS = 4


class WarmUp:
    """Position in the warm-up.

    Attributes:
        step: index of the current step in NODES; its length = the warm-up is over.
    """

    def __init__(self) -> None:
        self.step = 0

    @property
    def is_over(self) -> bool:
        return self.step >= len(NODES)

    @property
    def num_nodes(self) -> int:
        """Draft nodes per request of the current step; 0 after the warm-up."""
        return 0 if self.is_over else NODES[self.step]

    def end(self) -> None:
        """End the warm-up, because the costs are known or not needed."""
        self.step = len(NODES)

    def record_step(self, num_requests: int, credit_seconds: float) -> None:
        """Count a finished step.

        Args:
            num_requests: requests that got a token.
            credit_seconds: time credit after the step.
        """
        if self.is_over or not num_requests:
            return
        self.step += 1
        if self.step == FEW_PLAIN_STEPS and num_requests <= FEW_REQUESTS:
            self.step = NODES.count(0)
        if credit_seconds < 0.0 and self.step >= MIN_STEPS:
            self.end()
