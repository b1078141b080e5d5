"""Training loop: batches of traces in, losses back, optimizer steps. It does not know the method.

A run is a function of its plan and seed. The rows and the random numbers of a step depend only on its number, so a run
that is stopped and resumed ends with the same bits.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from foredraft.drafters.losses import Losses, Trace
from foredraft.errors import ForedraftError
from foredraft.train.checkpoint import TrainingCheckpoints
from foredraft.train.distributed import DistributedContext
from foredraft.train.metrics import MetricsWriter
from foredraft.train.optimizer import GroupedOptimizer, LearningRateSchedule
from foredraft.train.stopping import handle_stop_signals
from foredraft.train.timing import FIT_EVERY, Clock, StepTimer
from foredraft.train.windows import RowOrder

LOG_EVERY = 10  # steps between entries of metrics.jsonl
SMOOTHING = 0.9  # weight of the previous value in the moving average of the loss
# A step's random seed in a process is (seed * SEED_STRIDE + step) * STEP_STRIDE + rank.
SEED_STRIDE = 1_000_003  # larger than the number of steps
STEP_STRIDE = 1009  # larger than the number of processes


class TraceSource(Protocol):
    """Source of traces for the training steps."""

    def read(self, rows: Sequence[int], step: int) -> Trace: ...


@dataclass(frozen=True)
class LoopConfig:
    """Length of a run, and intervals of its checkpoints and evaluations."""

    steps: int
    batch_rows: int  # rows per step, over all processes
    accumulation_steps: int = 1  # forward and backward passes per step
    max_grad_norm: float = 1.0
    save_every: int = 200  # steps between checkpoints
    eval_every: int = 0  # steps between evaluations; 0 = at the end only
    max_steps: int | None = None  # steps before this run stops as if interrupted
    max_seconds: float | None = None  # the number of steps is fitted to this time


@dataclass(frozen=True)
class TrainStatus:
    """State of a run after a step, for progress displays."""

    step: int
    steps: int
    loss: float  # moving average
    tokens_per_second: float
    seconds_left: float
    eval_metrics: Mapping[str, Any] | None = None  # results of the last evaluation; None = none yet


@dataclass
class TrainLoop:
    """Loop over the steps of a run, with its checkpoints, evaluations and metrics."""

    distributed: DistributedContext
    networks: Mapping[str, nn.Module]  # networks whose state a checkpoint holds
    compute_loss: Callable[[Trace, int], Losses]  # from the trace of one pass and the step
    source: TraceSource
    order: RowOrder
    optimizer: GroupedOptimizer
    schedule: LearningRateSchedule
    loop_config: LoopConfig
    seed: int
    checkpoints: TrainingCheckpoints
    metrics_writer: MetricsWriter
    metadata: Mapping[str, Any]  # written into every checkpoint
    measure: Callable[[], Mapping[str, Any]]
    publish: Callable[[], None]  # writes the current drafter
    on_step: Callable[[TrainStatus], None] = lambda status: None
    clock: Clock = time.monotonic
    step: int = 0
    smoothed_loss: float = math.nan
    eval_metrics: Mapping[str, Any] | None = None
    steps: int = field(init=False)  # steps of the whole run; fewer than configured if max_seconds is short
    _num_tokens: int = field(default=0, init=False)  # tokens of the current step

    def __post_init__(self) -> None:
        self.steps = self.loop_config.steps

    def run(self) -> bool:
        """Run until all steps are done or the run is stopped.

        In both cases a checkpoint of the last step is written.

        Returns:
            True if all steps are done.
        """
        first_step, timing = self.step, StepTimer(self.clock)
        with handle_stop_signals() as is_signalled:
            while self.step < self.steps and not self._should_stop(first_step, timing, is_signalled()):
                start, self._num_tokens = self.clock(), 0
                components = self._advance()
                timing.record_step(self.clock() - start, self._num_tokens)
                self._fit_to_time(first_step, timing)
                self._report(timing, components)
                if (
                    self.loop_config.eval_every
                    and self.step % self.loop_config.eval_every == 0
                    and self.step < self.steps
                ):
                    self._measure()
                if self.step % self.loop_config.save_every == 0 and self.step < self.steps:
                    self._save()
            is_done = self.step >= self.steps
            self._save()  # before the evaluation, which may fail
            if is_done:
                self._measure()
        return is_done

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore step, loss and number of steps from the metadata of a checkpoint."""
        self.step, self.smoothed_loss = int(state["step"]), float(state["loss"])
        self._set_num_steps(int(state.get("steps", self.loop_config.steps)))

    def _advance(self) -> dict[str, float]:
        """Run one step; return the components of its loss and the norm of its gradient."""
        distributed, config, step = self.distributed, self.loop_config, self.step
        torch.manual_seed((self.seed * SEED_STRIDE + step) * STEP_STRIDE + distributed.rank)
        own_rows = config.batch_rows // distributed.num_processes
        rows = self.order.take(step * config.batch_rows + distributed.rank * own_rows, own_rows)
        size = -(-own_rows // config.accumulation_steps)
        sums: dict[str, float] = {}
        for first in range(0, own_rows, size):
            trace = self.source.read(rows[first : first + size], step)
            self._num_tokens += trace.tokens[:, 1:].numel() * distributed.num_processes
            with distributed.autocast():
                losses = self.compute_loss(trace, step)
            num_learnt = float(trace.mask.sum())
            (losses.total * num_learnt).backward()  # type: ignore[no-untyped-call]
            values = {**losses.components, "loss": losses.total.item(), "learnt": 1.0}
            sums = {name: sums.get(name, 0.0) + value * num_learnt for name, value in values.items()}
        means = self._combine(sums)
        loss = means.pop("loss")
        if not math.isfinite(loss):
            raise ForedraftError(f"the loss is {loss} at step {step + 1}; lower --learning-rate and begin again")
        norm = self.optimizer.step(self.schedule.compute_scale(step), config.max_grad_norm)
        self.smoothed_loss = (
            loss if math.isnan(self.smoothed_loss) else SMOOTHING * self.smoothed_loss + (1 - SMOOTHING) * loss
        )
        self.step += 1
        return {**means, "grad_norm": norm}

    def _combine(self, sums: dict[str, float]) -> dict[str, float]:
        """Turn this process's sums over tokens to learn, and its gradients, into means over all processes."""
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=self.distributed.device)
        self.distributed.all_reduce(values)
        total = dict(zip(names, values.tolist(), strict=True))
        num_learnt = max(total.pop("learnt"), 1.0)
        for parameter in self.optimizer.parameters:
            if parameter.grad is None:  # every process must take part in all_reduce
                parameter.grad = torch.zeros_like(parameter)
            self.distributed.all_reduce(parameter.grad)
            parameter.grad /= num_learnt
        return {name: value / num_learnt for name, value in total.items()}

    def _fit_to_time(self, first_step: int, timing: StepTimer) -> None:
        """Fit the number of steps to the time, so that the learning rate reaches zero when the time ends."""
        done, seconds = self.step - first_step, self.loop_config.max_seconds
        if seconds is None or done == 0 or done % FIT_EVERY:
            return
        fitted = torch.tensor(
            timing.fit_num_steps(self.step, self.loop_config.steps, seconds), device=self.distributed.device
        )
        self.distributed.broadcast([fitted])  # clocks differ between processes
        self._set_num_steps(int(fitted))

    def _set_num_steps(self, steps: int) -> None:
        if steps != self.steps:
            share = self.schedule.warmup / self.schedule.steps
            self.schedule = replace(self.schedule, steps=steps, warmup=max(1, round(share * steps)))
            self.steps = steps

    def _report(self, timing: StepTimer, components: Mapping[str, float]) -> None:
        speed, seconds_left = timing.tokens_per_second, timing.step_seconds * (self.steps - self.step)
        if self.step % LOG_EVERY == 0 or self.step == self.steps or self.step == 1:
            scale = self.schedule.compute_scale(self.step - 1) * self.optimizer.learning_rate
            metrics = {"loss": self.smoothed_loss, "learning_rate": scale, "tokens_per_second": speed, **components}
            self.metrics_writer.record(self.step, {name: float(f"{x:.6g}") for name, x in metrics.items()})
        self.on_step(TrainStatus(self.step, self.steps, self.smoothed_loss, speed, seconds_left, self.eval_metrics))

    def _measure(self) -> None:
        """Evaluate between steps. Only the main process evaluates; the others wait."""
        if self.distributed.is_main:
            with _switch_to_eval(self.networks.values()):
                self.eval_metrics = self.measure()
            if self.eval_metrics:
                self.metrics_writer.record(self.step, {"eval": dict(self.eval_metrics)})
        self.distributed.wait()

    def _save(self) -> None:
        if self.distributed.is_main:
            with _switch_to_eval(self.networks.values()):
                self.publish()
            metadata = {**self.metadata, "loss": self.smoothed_loss, "steps": self.steps}
            self.checkpoints.save(self.step, self.networks, self.optimizer, metadata)
        self.distributed.wait()

    def _should_stop(self, first_step: int, timing: StepTimer, is_signalled: bool) -> bool:
        config, done = self.loop_config, self.step - first_step
        is_time_over = config.max_seconds is not None and done > 0 and timing.elapsed_seconds >= config.max_seconds
        is_limit_reached = config.max_steps is not None and done >= config.max_steps
        return self.distributed.reduce_any(is_signalled or is_time_over or is_limit_reached)


@contextmanager
def _switch_to_eval(networks: Any) -> Iterator[None]:
    modes = [(network, network.training) for network in networks]
    for network, _ in modes:
        network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for network, is_training in modes:
            network.train(is_training)
