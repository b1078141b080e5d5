"""Training loop: the steps of a run with its checkpoints, evaluations and metrics. It does not depend on the method.

A run is a function of its plan and seed, so a run that is stopped and resumed ends with the same bits.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from foredraft.train.checkpoint import TrainingCheckpoints
from foredraft.train.learner import Learner
from foredraft.train.metrics import MetricsWriter
from foredraft.train.optimizer import LearningRateSchedule
from foredraft.train.stopping import handle_stop_signals
from foredraft.train.timing import FIT_EVERY, Clock, StepTimer

LOG_EVERY = 10  # steps between entries of metrics.jsonl
SMOOTHING = 0.9  # weight of the previous value in the moving average of the loss


@dataclass(frozen=True)
class LoopConfig:
    """Length of a run, and intervals of its checkpoints and evaluations."""

    steps: int
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


class TrainOutput(Protocol):
    """Current drafter of a run, as files and as figures."""

    def publish(self) -> None:
        """Write the current drafter."""

    def measure(self) -> Mapping[str, Any]:
        """Evaluate the current drafter; {} without held-out documents."""


@dataclass
class TrainLoop:
    """Loop over the steps of a run, with its checkpoints, evaluations and metrics."""

    learner: Learner
    output: TrainOutput
    schedule: LearningRateSchedule
    loop_config: LoopConfig
    checkpoints: TrainingCheckpoints
    metrics_writer: MetricsWriter
    on_step: Callable[[TrainStatus], None] = lambda status: None
    clock: Clock = time.monotonic
    step: int = 0
    smoothed_loss: float = math.nan
    eval_metrics: Mapping[str, Any] | None = None
    steps: int = field(init=False)  # steps of the whole run; fewer than configured if max_seconds is short

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
                start = self.clock()
                losses = self.learner.advance(self.step, self.steps, self.schedule.compute_scale(self.step))
                self._record_loss(losses.total)
                timing.record_step(self.clock() - start, losses.num_tokens)
                self._fit_to_time(first_step, timing)
                self._report(timing, losses.components)
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

    def resume(self, path: Path) -> None:
        """Restore networks, optimizer, step, loss and number of steps from a checkpoint."""
        state = self.checkpoints.load(path, self.learner.networks, self.learner.optimizer)
        self.step, self.smoothed_loss = int(state["step"]), float(state["loss"])
        self._set_num_steps(int(state.get("steps", self.loop_config.steps)))

    def _record_loss(self, loss: float) -> None:
        self.smoothed_loss = (
            loss if math.isnan(self.smoothed_loss) else SMOOTHING * self.smoothed_loss + (1 - SMOOTHING) * loss
        )
        self.step += 1

    def _fit_to_time(self, first_step: int, timing: StepTimer) -> None:
        """Fit the number of steps to the time, so that the learning rate reaches zero when the time ends."""
        done, seconds = self.step - first_step, self.loop_config.max_seconds
        if seconds is None or done == 0 or done % FIT_EVERY:
            return
        fitted = torch.tensor(
            timing.fit_num_steps(self.step, self.loop_config.steps, seconds), device=self.learner.distributed.device
        )
        self.learner.distributed.broadcast([fitted])  # clocks differ between processes
        self._set_num_steps(int(fitted))

    def _set_num_steps(self, steps: int) -> None:
        if steps != self.steps:
            share = self.schedule.warmup / self.schedule.steps
            self.schedule = replace(self.schedule, steps=steps, warmup=max(1, round(share * steps)))
            self.steps = steps

    def _report(self, timing: StepTimer, components: Mapping[str, float]) -> None:
        speed, seconds_left = timing.tokens_per_second, timing.step_seconds * (self.steps - self.step)
        if self.step % LOG_EVERY == 0 or self.step == self.steps or self.step == 1:
            scale = self.schedule.compute_scale(self.step - 1) * self.learner.optimizer.learning_rate
            metrics = {"loss": self.smoothed_loss, "learning_rate": scale, "tokens_per_second": speed, **components}
            self.metrics_writer.record(self.step, {name: float(f"{x:.6g}") for name, x in metrics.items()})
        self.on_step(TrainStatus(self.step, self.steps, self.smoothed_loss, speed, seconds_left, self.eval_metrics))

    def _measure(self) -> None:
        """Evaluate between steps."""
        with self._use_whole_weights() as takes_part:
            if takes_part:
                self.eval_metrics = self.output.measure()
        if self.learner.distributed.is_main and self.eval_metrics:
            self.metrics_writer.record(self.step, {"eval": dict(self.eval_metrics)})
        self.learner.distributed.wait()

    def _save(self) -> None:
        learner = self.learner
        optimizer_state = learner.optimizer.state_dict()
        with self._use_whole_weights() as takes_part:
            if takes_part:
                self.output.publish()
            if learner.distributed.is_main:
                metadata = {"loss": self.smoothed_loss, "steps": self.steps}
                self.checkpoints.save(self.step, learner.networks, optimizer_state, metadata)
        learner.distributed.wait()

    @contextmanager
    def _use_whole_weights(self) -> Iterator[bool]:
        """Gather the weights for evaluation or saving.

        Yields:
            Whether this process takes part. Without sharding, the others wait for the main process.
        """
        learner = self.learner
        with learner.placement.gather(), _switch_to_eval(learner.networks.values()):
            yield learner.distributed.is_main or learner.placement.is_sharded

    def _should_stop(self, first_step: int, timing: StepTimer, is_signalled: bool) -> bool:
        config, done = self.loop_config, self.step - first_step
        is_time_over = config.max_seconds is not None and done > 0 and timing.elapsed_seconds >= config.max_seconds
        is_limit_reached = config.max_steps is not None and done >= config.max_steps
        return self.learner.distributed.reduce_any(is_signalled or is_time_over or is_limit_reached)


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
