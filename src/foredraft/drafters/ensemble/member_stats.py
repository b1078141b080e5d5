"""Measured costs and use of a member of an ensemble. No tensors, no clock."""

from dataclasses import dataclass, field

from foredraft.drafters.ensemble.value import EstimateKey, LinearCost

MIN_DRAFTS = 3.0  # drafts of a member before its estimates are used
# steps without a draft before an unselected member is tried again; doubled after each retry
FIRST_RETRY_STEPS, MAX_RETRY_STEPS = 32, 512


@dataclass(eq=False)
class MemberStats:
    """Measured costs and use of a member whose drafts take time: it needs a forward pass of its own, or samples."""

    index: int
    max_nodes: int = 1 << 30  # maximum draft nodes per request in this step
    cost: LinearCost = field(default_factory=lambda: LinearCost(is_proportional=True))  # seconds by draft depth
    catch_up_seconds: float = 0.0  # extra seconds if it must first read tokens of steps without a draft
    depth_by_nodes: dict[int, float] = field(default_factory=dict)  # node budget -> average depth of the drafts
    num_uses: int = 0  # steps in which it drafted
    num_idle_steps: int = 0  # steps since its last draft
    retry_interval: int = FIRST_RETRY_STEPS  # idle steps before the next retry

    @property
    def key(self) -> EstimateKey:
        return self.index, 0

    def estimate_depth(self, num_nodes: int) -> float:
        """Estimate the depth of a draft with this node budget."""
        num_nodes = min(num_nodes, self.max_nodes)
        return self.depth_by_nodes.get(num_nodes, float(num_nodes))

    def record_time(self, depth: int, seconds: float, is_fresh: bool) -> None:
        if is_fresh:
            self.cost.update(depth, seconds)
        elif self.cost.is_fitted:
            self.catch_up_seconds += 0.2 * (max(seconds - self.cost.predict(depth), 0.0) - self.catch_up_seconds)

    def record_depth(self, num_nodes: int, depth: int) -> None:
        """Record the depth of a draft that had this node budget."""
        self.depth_by_nodes[num_nodes] = (
            0.8 * self.estimate_depth(num_nodes) + 0.2 * depth if num_nodes in self.depth_by_nodes else float(depth)
        )

    @property
    def is_due(self) -> bool:
        """Whether it must draft now: its estimates are not known yet, or it has not been tried for long."""
        return self.max_nodes > 0 and (self.num_uses < MIN_DRAFTS or self.num_idle_steps >= self.retry_interval)

    def forget_use(self) -> None:
        """Forget in which steps it drafted, as if it had never been tried; its costs are kept."""
        self.num_uses, self.num_idle_steps, self.retry_interval = 0, 0, FIRST_RETRY_STEPS

    def record_use(self, is_used: bool) -> None:
        """Record whether it drafted in a step."""
        if not is_used:
            self.num_idle_steps += 1
            return
        is_retry = self.is_due and self.num_uses >= MIN_DRAFTS
        self.retry_interval = min(2 * self.retry_interval, MAX_RETRY_STEPS) if is_retry else FIRST_RETRY_STEPS
        self.num_idle_steps = 0
        self.num_uses += 1
