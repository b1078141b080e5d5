"""Optimizer of sharded weights."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from foredraft.train.optimizer import GroupedOptimizer
from foredraft.train.sharded_tensors import gather_tensors, shard_like


class ShardedOptimizer(GroupedOptimizer):
    """AdamW of sharded weights. Its state is saved whole, so any number of processes can go on with it."""

    def clip_gradients(self, max_norm: float) -> float:
        """Clip the gradients of all processes together."""
        norm: Any = nn.utils.clip_grad_norm_(self.parameters, max_norm)
        return float(norm.full_tensor())

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the whole state. All processes call this together."""
        return gather_tensors(super().state_dict())  # type: ignore[no-any-return]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Load the part of this process from a whole state."""
        super().load_state_dict([self._shard_state(i, saved) for i, saved in enumerate(state)])

    def _shard_state(self, index: int, saved: dict[str, Any]) -> dict[str, Any]:
        parameters = [parameter for group in self.optimizers[index].param_groups for parameter in group["params"]]

        def shard(value: Any, parameter: Tensor) -> Any:
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape
            return shard_like(value, parameter) if is_moment else value

        moments = {
            i: {key: shard(value, parameters[i]) for key, value in entry.items()} for i, entry in saved["state"].items()
        }
        return {**saved, "state": moments}
