"""Costs and speed of an ensemble for requests of one kind: greedy or sampled. No tensors, no clock."""

from collections.abc import Mapping, Sequence
from copy import deepcopy

from foredraft.drafters.ensemble.member_stats import MemberStats
from foredraft.drafters.ensemble.value import LinearCost

RATE_WINDOW = 32.0  # steps over which the tokens per second are averaged


class KindCosts:
    """Costs of members and of the target's pass, and recent tokens per second.

    Greedy requests are often drafted for with twice the speed of sampled ones, and a value is a gain in tokens less a
    time at this speed. With a common speed, sampled requests would not draft for many steps after greedy ones.

    Args:
        model_stats: costs of the members with a forward pass of their own.
        sampling_stats: costs of the token members whose drafts may be samples, by their index.

    Attributes:
        pass_cost: seconds of the target's forward pass by rows.
        extension_cost: seconds that a token member takes to extend a draft, by the nodes of the extension.
    """

    def __init__(self, model_stats: Sequence[MemberStats], sampling_stats: Mapping[int, MemberStats]) -> None:
        self.model_stats, self.sampling_stats = list(model_stats), dict(sampling_stats)
        self.pass_cost = LinearCost(is_proportional=False)
        self.extension_cost = LinearCost(is_proportional=False)
        self._recent_tokens = self._recent_seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Recent tokens per second; 0 before the first step."""
        return self._recent_tokens / self._recent_seconds if self._recent_seconds > 0.0 else 0.0

    @property
    def all_stats(self) -> list[MemberStats]:
        """Costs of all members whose drafts take time."""
        return [*self.model_stats, *self.sampling_stats.values()]

    def copy_costs(self) -> "KindCosts":
        """Return costs for the other kind. They start from these, without the speed and without uses of members."""
        other = KindCosts(deepcopy(self.model_stats), deepcopy(self.sampling_stats))
        other.pass_cost, other.extension_cost = deepcopy(self.pass_cost), deepcopy(self.extension_cost)
        for stats in other.all_stats:
            stats.forget_use()
        return other

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Record the tokens and seconds of a whole step."""
        fade = 1.0 - 1.0 / RATE_WINDOW
        self._recent_tokens = self._recent_tokens * fade + num_tokens
        self._recent_seconds = self._recent_seconds * fade + seconds
