"""Training run: from a plan to a folder with a drafter."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foredraft.drafters.losses import Losses, Trace
from foredraft.drafters.method import Method
from foredraft.drafters.trainee import Trainee
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.train.cache import TraceCache
from foredraft.train.checkpoint import TrainingCheckpoints
from foredraft.train.config import TrainPlan, record_identity
from foredraft.train.corpora import load_documents
from foredraft.train.distributed import DistributedContext
from foredraft.train.drafter_output import DrafterOutput
from foredraft.train.job import LogLine, TrainJob
from foredraft.train.learner import BatchConfig, Learner, TraceSource
from foredraft.train.loop import LoopConfig, TrainLoop, TrainStatus
from foredraft.train.metrics import MetricsWriter
from foredraft.train.on_policy import OnPolicySource
from foredraft.train.optimizer import GroupedOptimizer, LearningRateSchedule, ParameterGroup
from foredraft.train.placement import ReplicatedWeights, ShardedWeights, WeightPlacement
from foredraft.train.remote.client import TargetClient
from foredraft.train.remote.connection import connect_server
from foredraft.train.remote.llm import RemoteLLM
from foredraft.train.remote.tracer import make_tracer
from foredraft.train.settings import find_trainable, parse_train_config, require_training
from foredraft.train.sharded_optimizer import ShardedOptimizer
from foredraft.train.sharded_target import load_sharded_target
from foredraft.train.start import create_trainee
from foredraft.train.timing import Clock
from foredraft.train.trace import Tracer, choose_top
from foredraft.train.trainable_target import TrainableTarget
from foredraft.train.windows import RowOrder, TokenWindows
from foredraft.train.with_target import TARGET_FOLDER, JointLoss

DEFAULT_STEPS = 1000  # limit of one pass over the data, if the plan sets no number of steps
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
    target: Path | None = None  # folder of the target that was trained with the drafter; None = it was frozen


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
    if distributed.sharding is not None:
        _check_shardable(plan)
    if not distributed.is_main:
        log_line, on_step = _ignore, _ignore
    llm = _load_target(plan, distributed)
    if plan.data.context > llm.target.context_length:
        raise ForedraftError(
            f"--context {plan.data.context} is longer than the {llm.target.context_length} tokens of "
            f"{llm.target.name}; give --context {llm.target.context_length} or less"
        )
    documents, held_out = load_documents(plan, llm, distributed, log_line)
    job = TrainJob(plan, method, training, config, distributed, llm, documents, held_out, log_line)
    if training.learn is not None:
        if plan.start is not None:
            raise ForedraftError(
                f"{plan.method} only counts tokens and starts from no other drafter; leave --start out"
            )
        return _learn_counts(job)
    return _train_by_gradients(job, on_step, clock)


def _check_shardable(plan: TrainPlan) -> None:
    """Raise ForedraftError for settings that need whole weights."""
    if plan.steps.optimizer == "muon":
        raise ForedraftError("muon needs whole matrices, and --use_fsdp shards them; give --optimizer adamw")
    if plan.data.cache is not None and plan.target_url is None:
        raise ForedraftError(
            "rows that the cache lacks need the whole target, and --use_fsdp shards it; leave --cache out"
        )


def _load_target(plan: TrainPlan, distributed: DistributedContext) -> LLM:
    """Load the target, its part in this process, or its tables if it runs on a server."""
    if plan.target_url is None and distributed.sharding is not None:
        return load_sharded_target(plan.model, plan.dtype, distributed, distributed.sharding)
    if plan.target_url is None:
        return LLM(plan.model, None, dtype=plan.dtype, device=distributed.device)
    server = connect_server(TargetClient(plan.target_url, plan.target_key))
    return RemoteLLM(plan.model, server, plan.dtype, distributed.device)


def _ignore(message: object) -> None:
    return


def _learn_counts(job: TrainJob) -> TrainResult:
    """Train a method that only counts tokens: one pass, without checkpoints."""
    plan, llm = job.plan, job.llm
    record_identity(plan.out, job.make_identity(), has_checkpoint=False)
    assert job.training.learn is not None
    job.training.learn(job.config, [document.ids for document in job.documents], llm.target, plan.out)
    eval_metrics = job.make_evaluator(llm, make_tracer(llm.target)).replay(plan.out)
    writer = MetricsWriter.open(plan.out, 0, plan.tensorboard)
    writer.record(1, {"eval": eval_metrics})
    writer.close()
    return TrainResult(plan.out, True, 1, 1, eval_metrics)


def _train_by_gradients(job: TrainJob, on_step: StepCallback, clock: Clock) -> TrainResult:
    """Train a drafter with the training loop, from its last checkpoint if there is one."""
    plan, distributed = job.plan, job.distributed
    checkpoints = TrainingCheckpoints(plan.out)
    latest = checkpoints.find_latest()
    identity = job.make_identity()
    if distributed.is_main:
        record_identity(plan.out, identity, latest is not None)
    distributed.wait()
    torch.manual_seed(plan.steps.seed)
    trainee = create_trainee(job)
    loop = _make_loop(job, trainee, checkpoints, on_step, clock)
    if latest is not None:
        loop.resume(latest)
        job.log_line(f"resuming after step {loop.step} of {loop.steps}")
    if distributed.is_main:
        loop.metrics_writer = MetricsWriter.open(plan.out, loop.step, plan.tensorboard)
    is_done = loop.run()
    loop.metrics_writer.close()
    return TrainResult(
        plan.out, is_done, loop.step, loop.steps, dict(loop.eval_metrics or {}), distributed.is_main,
        target=None if trainee.spec.joint is None else plan.out / TARGET_FOLDER,
    )  # fmt: skip


def _make_loop(
    job: TrainJob, trainee: Trainee, checkpoints: TrainingCheckpoints, on_step: StepCallback, clock: Clock
) -> TrainLoop:
    """Make the loop at step 0. Its metrics are discarded until it gets another writer."""
    plan, steps = job.plan, job.plan.steps
    windows = TokenWindows.pack(job.documents, plan.data.context)
    rows = _count_rows(job)
    total = steps.steps or min(-(-len(windows) // rows), DEFAULT_STEPS)
    job.log_line(
        f"{len(job.documents):,} documents, {len(windows):,} rows of {plan.data.context} tokens; {total} steps of "
        f"{rows} rows ({total * rows / len(windows):.2g} passes over the data)"
    )
    if num_cut := sum(
        document.source is not None and len(document.ids) > plan.data.context + 1 for document in job.documents
    ):
        job.log_line(
            f"{num_cut:,} of {len(job.documents):,} texts are longer than --context {plan.data.context}: only their "
            "beginnings are learnt"
        )
    top = plan.data.top or choose_top(job.llm.target.vocab_size)
    tracer = make_tracer(job.llm.target, trainee.spec.hidden_layers, top)
    joint_loss = _make_joint_loss(job, trainee)
    return TrainLoop(
        _make_learner(job, trainee, joint_loss, windows, tracer, total),
        DrafterOutput(job, trainee, job.make_evaluator(job.llm, tracer), joint_loss),
        LearningRateSchedule(total, max(1, round(steps.warmup * total)), steps.decay),
        LoopConfig(
            steps=total, save_every=plan.save_every, eval_every=plan.evaluation.every, max_steps=plan.max_steps,
            max_seconds=None if plan.max_minutes is None else 60 * plan.max_minutes,
        ),
        checkpoints, MetricsWriter(None), on_step, clock,
    )  # fmt: skip


def _count_rows(job: TrainJob) -> int:
    """Return the rows of one step, a multiple of the number of processes."""
    plan, num_processes = job.plan, job.distributed.num_processes
    rows = max(plan.steps.batch_tokens // plan.data.context, num_processes)
    return rows - rows % num_processes


def _make_joint_loss(job: TrainJob, trainee: Trainee) -> JointLoss | None:
    """Make the joint loss if the target is trained too; otherwise None."""
    joint = trainee.spec.joint
    if joint is None:
        return None
    if job.llm.target.has_encoder:
        raise ForedraftError(
            f"{job.llm.target.name} is an encoder-decoder model, which cannot be trained too; leave backbone out"
        )
    if job.plan.target_url is not None:
        raise ForedraftError("a target that is trained too must be here, not on a server; leave --target-url out")
    if job.distributed.sharding is not None:
        raise ForedraftError("a target that is trained too is not sharded; launch without --use_fsdp")
    if job.plan.data.cache is not None:
        raise ForedraftError("a target that is trained too has no fixed traces to cache; leave --cache out")
    target = TrainableTarget.from_model(
        job.llm.target, trainee.spec.hidden_layers, joint.lora, job.distributed.is_mixed
    )
    return JointLoss(trainee, target, joint)


def _make_learner(
    job: TrainJob, trainee: Trainee, joint_loss: JointLoss | None, windows: TokenWindows, tracer: Tracer, num_steps: int
) -> Learner:
    steps = job.plan.steps
    networks = _prepare_networks(job.distributed, trainee, joint_loss)
    placement = _place_weights(job.distributed, trainee, joint_loss)
    make_optimizer = ShardedOptimizer if placement.is_sharded else GroupedOptimizer
    groups = _group_parameters(trainee, joint_loss)
    return Learner(
        distributed=job.distributed,
        networks=networks,
        source=_make_source(job, trainee, windows, tracer, placement, num_steps),
        order=RowOrder(len(windows), steps.seed),
        optimizer=make_optimizer(steps.optimizer, groups, steps.learning_rate, steps.weight_decay),
        placement=placement,
        batch=BatchConfig(_count_rows(job), steps.parts, steps.clip),
        seed=steps.seed,
    )


def _prepare_networks(
    distributed: DistributedContext, trainee: Trainee, joint_loss: JointLoss | None
) -> dict[str, nn.Module]:
    """Move the trained networks to the device, in float32, with equal weights in every process."""
    networks: dict[str, nn.Module] = {"drafter": trainee.network.to(distributed.device).train()}
    if joint_loss is not None:
        networks["target"] = joint_loss.target.model
    for network in networks.values():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        distributed.broadcast(tensor.data for tensor in network.state_dict().values())
    return networks


def _place_weights(distributed: DistributedContext, trainee: Trainee, joint_loss: JointLoss | None) -> WeightPlacement:
    def compute_loss(trace: Trace, progress: float) -> Losses:
        return trainee.compute_loss(trace) if joint_loss is None else joint_loss(trace, progress)

    if distributed.sharding is None:
        return ReplicatedWeights(distributed, compute_loss)
    return ShardedWeights.shard(trainee.network, compute_loss, distributed, distributed.sharding)


def _group_parameters(trainee: Trainee, joint_loss: JointLoss | None) -> list[ParameterGroup]:
    groups = [ParameterGroup.from_network(trainee.network)]
    if joint_loss is not None:
        joint = joint_loss.joint
        groups.append(ParameterGroup.from_network(joint_loss.target.model, joint.rate, joint.warmup))
    return groups


def _make_source(
    job: TrainJob, trainee: Trainee, windows: TokenWindows, tracer: Tracer, placement: WeightPlacement, num_steps: int
) -> TraceSource:
    on_policy = trainee.spec.on_policy
    source = _make_data_source(job, windows, tracer, num_steps)
    if on_policy is None:
        return source
    make_policy = on_policy.make_policy

    def make_whole_policy() -> Any:
        with placement.gather():
            return make_policy()

    return OnPolicySource(source, windows, tracer, on_policy.share, job.plan.steps.seed, make_whole_policy)


def _make_data_source(job: TrainJob, windows: TokenWindows, tracer: Tracer, num_steps: int) -> TraceSource:
    """Make the source of traces of the data's own rows."""
    data = job.plan.data
    if data.cache is None:
        return OnlineTraceSource(windows, tracer)
    cache = TraceCache(Path(data.cache), windows, tracer, {
        "target": job.target_fingerprint, "dtype": str(job.llm.target.model.dtype), "text": job.text_digest,
        "context": data.context,
    })  # fmt: skip
    if job.distributed.is_main:
        cache.prepare(job.log_line, _count_rows(job) * num_steps)
    job.distributed.wait()
    return cache


@dataclass(frozen=True)
class OnlineTraceSource:
    """Source that computes traces when they are read."""

    windows: TokenWindows
    tracer: Tracer

    def read(self, rows: Sequence[int], step: int) -> Trace:
        return self.tracer.trace_rows(self.windows, rows)
