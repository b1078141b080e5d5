"""Training run: from a plan to a folder with a drafter."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foredraft.checkpoints import target_identity
from foredraft.checkpoints.schema import TargetInfo
from foredraft.checkpoints.target_reference import TARGET_NAME_KEY
from foredraft.drafters import checkpoint_folders
from foredraft.drafters.losses import Losses, Trace, Trainee
from foredraft.drafters.method import Method, Training
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.models.hf import HFModel
from foredraft.train.cache import TraceCache
from foredraft.train.checkpoint import TrainingCheckpoints
from foredraft.train.config import TrainPlan, record_identity
from foredraft.train.corpora import load_documents
from foredraft.train.distributed import DistributedContext
from foredraft.train.documents import Document, digest
from foredraft.train.evaluate import Evaluator
from foredraft.train.loop import LoopConfig, TraceSource, TrainLoop, TrainStatus
from foredraft.train.metrics import MetricsWriter
from foredraft.train.on_policy import OnPolicySource
from foredraft.train.optimizer import GroupedOptimizer, LearningRateSchedule, ParameterGroup
from foredraft.train.publish import publish
from foredraft.train.settings import find_trainable, parse_train_config, require_training
from foredraft.train.timing import Clock
from foredraft.train.trace import Tracer, choose_top
from foredraft.train.windows import RowOrder, TokenWindows
from foredraft.train.with_target import TARGET_FOLDER, WARMUP_SHARE, JointLoss, TrainableTarget

DEFAULT_STEPS = 1000  # limit of one pass over the data, if the plan sets no number of steps
FINGERPRINT_ROWS = 64  # rows of the embedding that identify the target, spread evenly
LogLine = Callable[[str], None]
StepCallback = Callable[[TrainStatus], None]


@dataclass(frozen=True)
class TrainResult:
    """Outcome of a training run."""

    folder: Path
    is_done: bool  # False if the run stopped before its last step
    step: int
    steps: int
    eval_metrics: dict[str, Any] = field(default_factory=dict)  # results of the last evaluation
    is_main: bool = True  # True in exactly one process of a run


def train(
    plan: TrainPlan,
    log_line: LogLine = lambda line: None,
    on_step: StepCallback = lambda status: None,
    method: Method | None = None,
    clock: Clock = time.monotonic,
) -> TrainResult:
    """Run a plan, or resume it from its last checkpoint.

    Args:
        plan: Settings of the run.
        log_line: Receives messages for the user.
        on_step: Receives the status after every step.
        method: Method to train; None = that of the plan.
        clock: Time in seconds, for `max_minutes` and the metrics.

    Raises:
        ForedraftError: if the plan cannot be run; the message says what to do.
    """
    plan.check()
    method = find_trainable(plan.method) if method is None else method
    training = require_training(method)
    config = parse_train_config(training, plan.settings or {})
    distributed = DistributedContext.detect(plan.device, plan.precision)
    if not distributed.is_main:
        log_line, on_step = _ignore, _ignore
    llm = LLM(plan.model, None, dtype=plan.dtype, device=distributed.device)
    if llm.target.has_encoder:
        raise ForedraftError(
            f"{llm.target.name} is an encoder-decoder model; drafters are trained only for decoders, on plain sequences"
        )
    if plan.data.context > llm.target.context_length:
        raise ForedraftError(
            f"--context {plan.data.context} is longer than the {llm.target.context_length} tokens of {llm.target.name}"
        )
    documents, held_out = load_documents(plan, llm, distributed, log_line)
    if training.learn is not None:
        if plan.start is not None:
            raise ForedraftError(
                f"{plan.method} only counts tokens and starts from no other drafter; leave --start out"
            )
        return _learn_counts(plan, training, config, llm, documents, held_out)
    return _TrainRun(
        plan, method, training, config, distributed, llm, documents, held_out, log_line, on_step, clock
    ).run()


def _ignore(message: object) -> None:
    return


def _learn_counts(
    plan: TrainPlan,
    training: Training,
    config: Any,
    llm: LLM,
    documents: Sequence[Document],
    held_out: Sequence[Document],
) -> TrainResult:
    """Train a method that only counts tokens: one pass, without checkpoints."""
    record_identity(
        plan.out,
        plan.make_identity(target=_fingerprint_target(llm.target), text=digest(documents)),
        has_checkpoint=False,
    )
    assert training.learn is not None
    training.learn(config, [document.ids for document in documents], llm.target, plan.out)
    eval_metrics = Evaluator(llm, plan.method, plan.evaluation, held_out, plan.data.context, Tracer(llm.target)).replay(
        plan.out
    )
    writer = MetricsWriter.open(plan.out, 0, plan.tensorboard)
    writer.record(1, {"eval": eval_metrics})
    writer.close()
    return TrainResult(plan.out, True, 1, 1, eval_metrics)


@dataclass
class _TrainRun:
    """State of a run by gradient descent."""

    plan: TrainPlan
    method: Method
    training: Training
    config: Any
    distributed: DistributedContext
    llm: LLM
    documents: Sequence[Document]
    held_out: Sequence[Document]
    log_line: LogLine
    on_step: StepCallback
    clock: Clock

    def run(self) -> TrainResult:
        plan, distributed = self.plan, self.distributed
        checkpoints = TrainingCheckpoints(plan.out)
        latest = checkpoints.find_latest()
        self.target_fingerprint = _fingerprint_target(self.llm.target)
        identity = plan.make_identity(target=self.target_fingerprint, text=digest(self.documents))
        if distributed.is_main:
            record_identity(plan.out, identity, latest is not None)
        distributed.wait()
        torch.manual_seed(plan.steps.seed)
        start = self._load_start()
        assert self.training.create_trainee is not None
        self.trainee: Trainee = self.training.create_trainee(self.config, self.llm.target, start)
        if start is not None:
            self._check_shape_settings()
        elif hasattr(self.trainee, "prepare"):
            self.trainee.prepare(self._count_loss_tokens())
        loop = self._make_loop(checkpoints)
        if latest is not None:
            loop.resume(checkpoints.load(latest, loop.networks, loop.optimizer))
            self.log_line(f"resuming after step {loop.step} of {loop.steps}")
        loop.metrics_writer = (
            MetricsWriter.open(plan.out, loop.step, plan.tensorboard) if distributed.is_main else MetricsWriter(None)
        )
        is_done = loop.run()
        loop.metrics_writer.close()
        return TrainResult(plan.out, is_done, loop.step, loop.steps, dict(loop.eval_metrics or {}), distributed.is_main)

    def _count_loss_tokens(self) -> Tensor:
        """Count [V] how often each token is learnt."""
        counts = np.zeros(self.llm.target.vocab_size, dtype=np.int64)
        for document in self.documents:
            counts += np.bincount(document.ids[document.loss_mask].astype(np.int64), minlength=len(counts))
        return torch.from_numpy(counts)

    def _load_start(self) -> Any:
        """Return the checkpoint to start from, its folder if it is a whole model, or None."""
        if self.plan.start is None:
            return None
        if not Path(self.plan.start).is_dir():
            raise ForedraftError(f"--start {self.plan.start!r} is not a folder; give one that holds a drafter")
        target = self.llm.target
        method, _ = checkpoint_folders.recognise(self.plan.start, self.method)
        if not checkpoint_folders.list_formats(self.method)[method].has_reader:
            return Path(self.plan.start)
        info = TargetInfo(target.name, target.hidden_size, target.vocab_size, target.num_layers)
        return checkpoint_folders.read(self.plan.start, info, self.method)

    def _check_shape_settings(self) -> None:
        """Raise ForedraftError if the user set a size that differs from that of the drafter to start from."""
        fixed = self.config.read_shape(self.trainee.network)
        for name in self.plan.settings or ():
            if name in fixed and fixed[name] != vars(self.config)[name]:
                raise ForedraftError(
                    f"--start {self.plan.start!r} has {name}={fixed[name]}, not {vars(self.config)[name]}; leave --set "
                    f"{name} out, or train without --start"
                )

    def _make_loop(self, checkpoints: TrainingCheckpoints) -> TrainLoop:
        plan, steps, distributed = self.plan, self.plan.steps, self.distributed
        windows = TokenWindows.pack(self.documents, plan.data.context)
        rows = max(steps.batch_tokens // plan.data.context, distributed.num_processes)
        rows -= rows % distributed.num_processes
        total = steps.steps or min(-(-len(windows) // rows), DEFAULT_STEPS)
        self.log_line(
            f"{len(self.documents):,} documents, {len(windows):,} rows of {plan.data.context} tokens; {total} steps of "
            f"{rows} rows ({total * rows / len(windows):.2g} passes over the data)"
        )
        top = plan.data.top or choose_top(self.llm.target.vocab_size, is_cached=plan.data.cache is not None)
        self.tracer = Tracer(self.llm.target, self.trainee.hidden_layers, top)
        self.evaluator = self._make_evaluator(self.llm, self.tracer)
        self.joint_loss = self._make_joint_loss(total)
        networks, groups = self._prepare_networks()
        return TrainLoop(
            distributed=distributed,
            networks=networks,
            compute_loss=self.joint_loss or self._compute_loss,
            source=self._make_source(windows),
            order=RowOrder(len(windows), steps.seed),
            optimizer=GroupedOptimizer(steps.optimizer, groups, steps.learning_rate, steps.weight_decay),
            schedule=LearningRateSchedule(total, max(1, round(steps.warmup * total)), steps.decay),
            loop_config=LoopConfig(
                steps=total, batch_rows=rows, accumulation_steps=steps.parts, max_grad_norm=steps.clip,
                save_every=plan.save_every,
                eval_every=plan.evaluation.every, max_steps=plan.max_steps,
                max_seconds=None if plan.max_minutes is None else 60 * plan.max_minutes,
            ),
            seed=steps.seed,
            checkpoints=checkpoints,
            metrics_writer=MetricsWriter(None),
            metadata={},
            measure=self._measure,
            publish=self._publish_output,
            on_step=self.on_step,
            clock=self.clock,
        )  # fmt: skip

    def _make_joint_loss(self, num_steps: int) -> JointLoss | None:
        """Make the joint loss if the target is trained too; otherwise None."""
        if getattr(self.trainee, "backbone", None) is None:
            return None
        if self.plan.data.cache is not None:
            raise ForedraftError("a target that is trained too has no fixed traces to cache; leave --cache out")
        warmup = getattr(self.trainee, "warmup_heads", None)
        loss = getattr(self.config, "loss", "kl")
        trainable = TrainableTarget.from_model(self.llm.target, self.trainee.hidden_layers)
        return JointLoss(
            self.trainee, trainable, loss, round(WARMUP_SHARE * num_steps) if warmup is None else int(warmup)
        )

    def _prepare_networks(self) -> tuple[dict[str, nn.Module], list[ParameterGroup]]:
        """Move the trained networks to the device, in float32, with equal weights in every process."""
        networks: dict[str, nn.Module] = {"drafter": self.trainee.network.to(self.distributed.device).train()}
        rates = {"drafter": 1.0}
        if self.joint_loss is not None:
            networks["target"], rates["target"] = (
                self.joint_loss.target.model,
                float(getattr(self.trainee, "backbone", 0.0)),
            )
        for network in networks.values():
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            self.distributed.broadcast(tensor.data for tensor in network.state_dict().values())
        return networks, [ParameterGroup.from_network(network, rates[name]) for name, network in networks.items()]

    def _make_source(self, windows: TokenWindows) -> TraceSource:
        plan, source = self.plan, OnlineTraceSource(windows, self.tracer)
        if plan.data.cache is not None:
            cache = TraceCache(Path(plan.data.cache), windows, self.tracer, {
                "target": self.target_fingerprint, "taps": self.tracer.hidden_layers, "top": self.tracer.top,
                "text": digest(self.documents), "context": plan.data.context,
            })  # fmt: skip
            if self.distributed.is_main:
                cache.fill(self.log_line)
            self.distributed.wait()
            return cache
        share = getattr(self.trainee, "on_policy", 0.0)
        if not share:
            return source
        policy: Any = self.trainee
        return OnPolicySource(source, windows, self.tracer, share, plan.steps.seed, policy.make_policy)

    def _compute_loss(self, trace: Trace, step: int) -> Losses:
        return self.trainee.compute_loss(trace)

    def _make_evaluator(self, llm: LLM, tracer: Tracer) -> Evaluator:
        plan = self.plan
        return Evaluator(llm, plan.method, plan.evaluation, self.held_out, plan.data.context, tracer)

    def _make_current_evaluator(self) -> Evaluator:
        """Return the evaluator; if the target is trained too, one with a copy of its current state."""
        if self.joint_loss is None:
            return self.evaluator
        llm = self.joint_loss.make_llm(self.llm.target.model.dtype, self.llm.tokenizer)
        return self._make_evaluator(llm, Tracer(llm.target, self.trainee.hidden_layers, self.tracer.top))

    def _publish_output(self) -> None:
        self._publish(self.plan.out, self._make_current_evaluator())
        if self.joint_loss is not None:
            self.joint_loss.save(self.plan.out, self.llm.target.model.dtype, self.llm.tokenizer)

    def _publish(self, folder: Path, evaluator: Evaluator) -> None:
        """Write the current drafter. A trainee with `finish` first measures held-out documents, to choose its tree."""
        finish = getattr(self.trainee, "finish", None)
        traces = evaluator.trace_held_out() if finish is not None else []
        if finish is not None and traces:
            finish(traces)
        target: str | None = self.llm.target.name
        extra_config: dict[str, Any] = {
            target_identity.NORMS_KEY: target_identity.compute_norms(evaluator.llm.target.embedding)
        }
        if self.joint_loss is not None:  # the heads fit only the target that was trained with them
            target, extra_config = (
                None,
                extra_config | {target_identity.FOLDER_KEY: TARGET_FOLDER, TARGET_NAME_KEY: TARGET_FOLDER},
            )
        publish(self.trainee, self.plan.method, folder, self.llm.target.model.dtype, target, extra_config)

    def _measure(self) -> dict[str, Any]:
        evaluator = self._make_current_evaluator()
        with self.distributed.autocast():
            metrics: dict[str, Any] = evaluator.measure_loss(self.trainee.compute_loss)
        return metrics | evaluator.measure_acceptance(lambda folder: self._publish(folder, evaluator))


@dataclass(frozen=True)
class OnlineTraceSource:
    """Source that computes traces when they are read."""

    windows: TokenWindows
    tracer: Tracer

    def read(self, rows: Sequence[int], step: int) -> Trace:
        return self.tracer.trace(*self.windows.read(rows))


def _fingerprint_target(target: HFModel) -> dict[str, Any]:
    """Identify the target from a sample of its embedding: weights may change under the same name."""
    sample = target.embedding[:: max(1, len(target.embedding) // FINGERPRINT_ROWS)].double()
    return {
        "parameters": target.num_parameters,
        "vocab_size": target.vocab_size,
        "sum": float(f"{float(sample.sum()):.9g}"),
    }
