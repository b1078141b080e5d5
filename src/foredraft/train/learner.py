"""Networks in training: one step of gradient descent, from rows of the data to changed weights.

The rows and the random numbers of a step depend only on its number and the seed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from foredraft.drafters.losses import Trace
from foredraft.errors import ForedraftError
from foredraft.train.distributed import DistributedContext
from foredraft.train.optimizer import GroupedOptimizer
from foredraft.train.placement import WeightPlacement
from foredraft.train.windows import RowOrder

# A step's random seed in a process is (seed * SEED_STRIDE + step) * STEP_STRIDE + rank.
SEED_STRIDE = 1_000_003  # larger than the number of steps
STEP_STRIDE = 1009  # larger than the number of processes


class TraceSource(Protocol):
    """Source of traces for the training steps."""

    def read(self, rows: Sequence[int], step: int) -> Trace: ...


@dataclass(frozen=True)
class BatchConfig:
    """Rows of a step, and how they are learnt."""

    rows: int  # rows per step, over all processes
    accumulation_steps: int = 1  # forward and backward passes per step
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class StepLosses:
    """Losses of one step as means over all tokens to learn, and the size of the step."""

    total: float
    components: Mapping[str, float]  # of the loss by name, and the norm of the gradient
    num_tokens: int  # tokens of all processes


@dataclass(frozen=True)
class Learner:
    """Networks with their data, loss and optimizer."""

    distributed: DistributedContext
    networks: Mapping[str, nn.Module]  # networks whose state a checkpoint holds
    source: TraceSource
    order: RowOrder
    optimizer: GroupedOptimizer
    placement: WeightPlacement
    batch: BatchConfig
    seed: int

    def advance(self, step: int, num_steps: int, rate_scale: float) -> StepLosses:
        """Run one step.

        Args:
            step: Number of completed steps.
            num_steps: Number of steps of the run.
            rate_scale: Factor of the learning rate.

        Raises:
            ForedraftError: if the loss is not finite.
        """
        distributed, batch, progress = self.distributed, self.batch, step / num_steps
        torch.manual_seed((self.seed * SEED_STRIDE + step) * STEP_STRIDE + distributed.rank)
        own_rows = batch.rows // distributed.num_processes
        rows = self.order.take(step * batch.rows + distributed.rank * own_rows, own_rows)
        size = -(-own_rows // batch.accumulation_steps)
        sums: dict[str, float] = {}
        num_tokens = 0
        for first in range(0, own_rows, size):
            trace = self.source.read(rows[first : first + size], step)
            num_tokens += trace.tokens[:, 1:].numel() * distributed.num_processes
            with distributed.autocast():
                losses = self.placement.compute_loss(trace, progress)
            num_learnt = float(trace.mask.sum())
            (losses.total * num_learnt).backward()  # type: ignore[no-untyped-call]
            values = {**losses.components, "loss": losses.total.item(), "learnt": 1.0}
            sums = {name: sums.get(name, 0.0) + value * num_learnt for name, value in values.items()}
        means = self._combine(sums)
        loss = means.pop("loss")
        if not math.isfinite(loss):
            raise ForedraftError(f"the loss is {loss} at step {step + 1}; lower --learning-rate and begin again")
        norm = self.optimizer.step(rate_scale, batch.max_grad_norm, progress)
        return StepLosses(loss, {**means, "grad_norm": norm}, num_tokens)

    def _combine(self, sums: dict[str, float]) -> dict[str, float]:
        """Turn this process's sums over tokens to learn, and its gradients, into means over all processes."""
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=self.distributed.device)
        self.distributed.all_reduce(values)
        total = dict(zip(names, values.tolist(), strict=True))
        num_learnt = max(total.pop("learnt"), 1.0)
        for parameter in self.optimizer.parameters:
            if parameter.grad is None:  # every process must take part in the sum
                parameter.grad = torch.zeros_like(parameter)
            self.placement.sum_gradient(parameter.grad)
            parameter.grad /= num_learnt
        return {name: value / num_learnt for name, value in total.items()}
