"""Times of the steps of an ensemble, for its estimates of cost and rate."""

from collections.abc import Callable
from dataclasses import dataclass

from foredraft.drafters.ensemble.kind_costs import KindCosts


@dataclass
class ProposalTimer:
    """Start and end of the last proposal. The pass of the target follows, until `observe`."""

    clock: Callable[[], float]  # seconds
    started: float = 0.0
    ended: float = 0.0
    num_rows: int = 0  # verified nodes of the step

    def start(self) -> None:
        self.started = self.clock()

    def end(self, num_rows: int) -> None:
        self.num_rows, self.ended = num_rows, self.clock()

    def record(self, costs: KindCosts, num_tokens: int, now: float) -> None:
        """Record the time of the pass by its rows, and that of the step by its tokens."""
        costs.pass_cost.update(self.num_rows, now - self.ended)
        costs.record_step(num_tokens, now - self.started)
