"""The loop: batches of traces in, losses back, steps of the optimizer; it knows no method.

A run is a function of its plan and seed alone: what a step reads and draws depends on its number, so that a run which
was stopped and taken up again ends with the same bits.
"""

import math
import signal
import threading
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
from foredraft.train.timing import FIT_EVERY, Clock, StepTimer
from foredraft.train.windows import RowOrder

LOG_EVERY = 10  # steps between entries of metrics.jsonl
SMOOTHING = 0.9


class TraceSource(Protocol):
    """Source of traces for the training steps."""

    def read(self, rows: Sequence[int], step: int) -> Trace: ...


@dataclass(frozen=True)
class LoopConfig:
    """How long a run goes on and what it does on its way."""

    steps: int
    batch_rows: int  # of a step, over all processes
    accumulation_steps: int = 1  # passes that one step is made of
    max_grad_norm: float = 1.0
    save_every: int = 200
    eval_every: int = 0  # 0 = at the end
    max_steps: int | None = None  # of this run, after which it stops as if interrupted
    max_seconds: float | None = None


@dataclass(frozen=True)
class TrainStatus:
    """State of a run after a step, for progress displays."""

    step: int
    steps: int
    loss: float  # smoothed
    tokens_per_second: float
    seconds_left: float
    eval_metrics: Mapping[str, Any] | None = None  # of the last measurement, once there is one


@dataclass
class TrainLoop:
    distributed: DistributedContext
    networks: Mapping[str, nn.Module]  # whose state a checkpoint holds
    compute_loss: Callable[[Trace, int], Losses]  # of a part of a step's batch
    source: TraceSource
    order: RowOrder
    optimizer: GroupedOptimizer
    schedule: LearningRateSchedule
    loop_config: LoopConfig
    seed: int
    checkpoints: TrainingCheckpoints
    metrics_writer: MetricsWriter
    metadata: Mapping[str, Any]  # goes into every checkpoint
    measure: Callable[[], Mapping[str, Any]]
    publish: Callable[[], None]  # write what can be drafted with now
    on_step: Callable[[TrainStatus], None] = lambda standing: None
    clock: Clock = time.monotonic
    step: int = 0
    smoothed_loss: float = math.nan
    eval_metrics: Mapping[str, Any] | None = None
    steps: int = field(init=False)  # in all; fewer than asked for where the time is short
    _is_stopped: bool = field(default=False, init=False)
    _num_tokens: int = field(default=0, init=False)  # of the step under way

    def __post_init__(self) -> None:
        self.steps = self.loop_config.steps

    def run(self) -> bool:
        """Go on until all steps are done; False if stopped before. Either way the checkpoint is of the last step."""
        first, timing = self.step, StepTimer(self.clock)
        with self._handle_signals():
            while self.step < self.steps and not self._should_stop(first, timing):
                began, self._num_tokens = self.clock(), 0
                parts = self._advance()
                timing.record_step(self.clock() - began, self._num_tokens)
                self._fit_to_time(first, timing)
                self._report(timing, parts)
                if (
                    self.loop_config.eval_every
                    and self.step % self.loop_config.eval_every == 0
                    and self.step < self.steps
                ):
                    self._measure()
                if self.step % self.loop_config.save_every == 0 and self.step < self.steps:
                    self._save()
            is_done = self.step >= self.steps
            self._save()  # before the measurement, which may fail
            if is_done:
                self._measure()
        return is_done

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint says."""
        self.step, self.smoothed_loss = int(state["step"]), float(state["loss"])
        self._set_num_steps(int(state.get("steps", self.loop_config.steps)))

    def _advance(self) -> dict[str, float]:
        """One step; the parts of its loss, and the norm of its gradient."""
        place, pace, step = self.distributed, self.loop_config, self.step
        torch.manual_seed((self.seed * 1_000_003 + step) * 1009 + place.rank)
        own = pace.batch_rows // place.num_processes
        rows = self.order.take(step * pace.batch_rows + place.rank * own, own)
        size = -(-own // pace.accumulation_steps)
        sums: dict[str, float] = {}
        for first in range(0, own, size):
            trace = self.source.read(rows[first : first + size], step)
            self._num_tokens += trace.tokens[:, 1:].numel() * place.num_processes
            with place.autocast():
                losses = self.compute_loss(trace, step)
            learnt = float(trace.mask.sum())
            (losses.total * learnt).backward()  # type: ignore[no-untyped-call]
            found = {**losses.components, "loss": losses.total.item(), "learnt": 1.0}
            sums = {name: sums.get(name, 0.0) + value * learnt for name, value in found.items()}
        means = self._combine(sums)
        loss = means.pop("loss")
        if not math.isfinite(loss):
            raise ForedraftError(f"the loss is {loss} at step {step + 1}; lower --learning-rate and begin again")
        norm = self.optimizer.step(self.schedule.compute_scale(step), pace.max_grad_norm)
        self.smoothed_loss = (
            loss if math.isnan(self.smoothed_loss) else SMOOTHING * self.smoothed_loss + (1 - SMOOTHING) * loss
        )
        self.step += 1
        return {**means, "grad_norm": norm}

    def _combine(self, sums: dict[str, float]) -> dict[str, float]:
        """Sums over this process's tokens to learn become means over all processes'; so do the gradients."""
        names = sorted(sums)
        values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=self.distributed.device)
        self.distributed.all_reduce(values)
        total = dict(zip(names, values.tolist(), strict=True))
        learnt = max(total.pop("learnt"), 1.0)
        for parameter in self.optimizer.parameters:
            if parameter.grad is None:  # every process has to send something
                parameter.grad = torch.zeros_like(parameter)
            self.distributed.all_reduce(parameter.grad)
            parameter.grad /= learnt
        return {name: value / learnt for name, value in total.items()}

    def _fit_to_time(self, first: int, timing: StepTimer) -> None:
        """As many steps as the time allows, so that the learning rate reaches zero with it."""
        done, seconds = self.step - first, self.loop_config.max_seconds
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

    def _report(self, timing: StepTimer, parts: Mapping[str, float]) -> None:
        speed, left = timing.tokens_per_second, timing.step_seconds * (self.steps - self.step)
        if self.step % LOG_EVERY == 0 or self.step == self.steps or self.step == 1:
            scale = self.schedule.compute_scale(self.step - 1) * self.optimizer.learning_rate
            figures = {"loss": self.smoothed_loss, "learning_rate": scale, "tokens_per_second": speed, **parts}
            self.metrics_writer.record(self.step, {name: float(f"{x:.6g}") for name, x in figures.items()})
        self.on_step(TrainStatus(self.step, self.steps, self.smoothed_loss, speed, left, self.eval_metrics))

    def _measure(self) -> None:
        """Between steps; only the first process measures, the others wait."""
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
            about = {**self.metadata, "loss": self.smoothed_loss, "steps": self.steps}
            self.checkpoints.save(self.step, self.networks, self.optimizer, about)
        self.distributed.wait()

    def _should_stop(self, first: int, timing: StepTimer) -> bool:
        pace, done = self.loop_config, self.step - first
        is_late = pace.max_seconds is not None and done > 0 and timing.elapsed_seconds >= pace.max_seconds
        is_enough = pace.max_steps is not None and done >= pace.max_steps
        return self.distributed.reduce_any(self._is_stopped or is_late or is_enough)

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM stop after the step under way; a second Ctrl-C stops at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, frame: object) -> None:
            if self._is_stopped and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._is_stopped = True

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


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
