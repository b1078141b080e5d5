"""One training run from a plan to a folder with a drafter in it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foredraft import LLM
from foredraft.checkpoints import identity, read
from foredraft.checkpoints.base import TargetFacts
from foredraft.checkpoints.naming import NAME
from foredraft.drafters.training import Losses, Trace, Trainee
from foredraft.errors import ForedraftError
from foredraft.models.lm import HFModel
from foredraft.train.cache import Cache
from foredraft.train.checkpoint import Checkpoints
from foredraft.train.documents import Document, digest
from foredraft.train.evaluate import Evaluator
from foredraft.train.joint import FOLDER, WARMUP, Joint
from foredraft.train.joint import Live as LiveTarget
from foredraft.train.loop import Loop, Pace, Source, Standing
from foredraft.train.metrics import Metrics
from foredraft.train.optimizer import Group, Optimizer, Schedule
from foredraft.train.place import Place
from foredraft.train.plan import Plan, settle
from foredraft.train.policy import OnPolicy
from foredraft.train.publish import publish
from foredraft.train.settings import config_of, method_of
from foredraft.train.texts import texts
from foredraft.train.timing import Clock
from foredraft.train.trace import Tracer, default_top
from foredraft.train.windows import Order, Windows

DEFAULT_STEPS = 1000
Say = Callable[[str], None]
Watch = Callable[[Standing], None]


@dataclass(frozen=True)
class Outcome:
    folder: Path
    is_done: bool
    step: int
    steps: int
    figures: dict[str, Any] = field(default_factory=dict)  # of the last measurement
    is_main: bool = True  # False in all processes of a run but one


def train(
    plan: Plan,
    say: Say = lambda line: None,
    watch: Watch = lambda standing: None,
    module: Any = None,
    clock: Clock = time.monotonic,
) -> Outcome:
    """Run a plan, or go on with it where it stopped. Raises ForedraftError with one line that says what to do.

    module: what trains, where it is not the method of that name. clock: seconds, for `max_minutes` and the figures.
    """
    plan.check()
    module = method_of(plan.method) if module is None else module
    config = config_of(module, plan.settings or {})
    place = Place.find(plan.device, plan.precision)
    if not place.is_main:
        say, watch = _silent, _silent
    llm = LLM(plan.model, None, dtype=plan.dtype, device=place.device)
    if llm.target.has_encoder:
        raise ForedraftError(
            f"{llm.target.name} is an encoder-decoder model; drafters are trained for decoders, from texts alone"
        )
    if plan.data.context > llm.target.context_length:
        raise ForedraftError(
            f"--context {plan.data.context} is longer than the {llm.target.context_length} tokens of {llm.target.name}"
        )
    documents, held = texts(plan, llm, place, say)
    if hasattr(module, "learn"):
        return _learn(plan, module, config, llm, documents, held)
    return _Run(plan, module, config, place, llm, documents, held, say, watch, clock).go()


def _silent(said: object) -> None:
    return


def _learn(
    plan: Plan, module: Any, config: Any, llm: LLM, documents: Sequence[Document], held: Sequence[Document]
) -> Outcome:
    """A method that counts: one pass, nothing to go on from."""
    settle(plan.out, plan.identity(target=_fingerprint(llm.target), text=digest(documents)), has_checkpoint=False)
    module.learn(config, [document.ids for document in documents], llm.target, plan.out)
    figures = Evaluator(llm, plan.method, plan.evaluation, held, plan.data.context, Tracer(llm.target)).replayed(
        plan.out
    )
    metrics = Metrics.open(plan.out, 0, plan.tensorboard)
    metrics.note(1, {"eval": figures})
    metrics.close()
    return Outcome(plan.out, True, 1, 1, figures)


@dataclass
class _Run:
    plan: Plan
    module: Any
    config: Any
    place: Place
    llm: LLM
    documents: Sequence[Document]
    held: Sequence[Document]
    say: Say
    watch: Watch
    clock: Clock

    def go(self) -> Outcome:
        plan, place = self.plan, self.place
        checkpoints = Checkpoints(plan.out)
        found = checkpoints.latest()
        self.target_facts = _fingerprint(self.llm.target)
        identity = plan.identity(target=self.target_facts, text=digest(self.documents))
        if place.is_main:
            settle(plan.out, identity, found is not None)
        place.wait()
        torch.manual_seed(plan.steps.seed)
        self.trainee: Trainee = self.module.trainee(self.config, self.llm.target, self._start())
        if plan.start is None and hasattr(self.trainee, "prepare"):
            self.trainee.prepare(self._counts())
        loop = self._loop(checkpoints)
        if found is not None:
            loop.resume(checkpoints.load(found, loop.networks, loop.optimizer))
            self.say(f"going on after step {loop.step} of {loop.steps}")
        loop.metrics = Metrics.open(plan.out, loop.step, plan.tensorboard) if place.is_main else Metrics(None)
        is_done = loop.run()
        loop.metrics.close()
        return Outcome(plan.out, is_done, loop.step, loop.steps, dict(loop.figures or {}), place.is_main)

    def _counts(self) -> Tensor:
        """[V] how often each token is one to learn."""
        counts = np.zeros(self.llm.target.vocab_size, dtype=np.int64)
        for document in self.documents:
            counts += np.bincount(document.ids[document.mask].astype(np.int64), minlength=len(counts))
        return torch.from_numpy(counts)

    def _start(self) -> Any:
        """A checkpoint that was read, or the folder where it is a whole model."""
        if self.plan.start is None:
            return None
        if not Path(self.plan.start).is_dir():
            raise ForedraftError(f"--start {self.plan.start!r} is not a folder; give one that holds a drafter")
        target = self.llm.target
        found, _ = read.recognise(self.plan.start)
        if found not in read.READERS:
            return Path(self.plan.start)
        facts = TargetFacts(target.name, target.hidden_size, target.vocab_size, target.num_layers)
        return read.read(self.plan.start, facts, self.plan.method)

    def _loop(self, checkpoints: Checkpoints) -> Loop:
        plan, steps, place = self.plan, self.plan.steps, self.place
        windows = Windows.pack(self.documents, plan.data.context)
        rows = max(steps.batch_tokens // plan.data.context, place.num_processes)
        rows -= rows % place.num_processes
        total = steps.steps or min(-(-len(windows) // rows), DEFAULT_STEPS)
        self.say(
            f"{len(self.documents):,} texts, {len(windows):,} rows of {plan.data.context} tokens; {total} steps of "
            f"{rows} rows ({total * rows / len(windows):.2g} passes over the data)"
        )
        top = plan.data.top or default_top(self.llm.target.vocab_size, is_cached=plan.data.cache is not None)
        self.tracer = Tracer(self.llm.target, self.trainee.taps, top)
        self.evaluator = self._evaluator_of(self.llm, self.tracer)
        self.joint = self._joint(total)
        networks, groups = self._networks()
        return Loop(
            place=place,
            networks=networks,
            loss=self.joint or self._loss,
            source=self._source(windows),
            order=Order(len(windows), steps.seed),
            optimizer=Optimizer(steps.optimizer, groups, steps.learning_rate, steps.weight_decay),
            schedule=Schedule(total, max(1, round(steps.warmup * total)), steps.decay),
            pace=Pace(
                steps=total, rows=rows, parts=steps.parts, clip=steps.clip, save_every=plan.save_every,
                eval_every=plan.evaluation.every, max_steps=plan.max_steps,
                max_seconds=None if plan.max_minutes is None else 60 * plan.max_minutes,
            ),
            seed=steps.seed,
            checkpoints=checkpoints,
            metrics=Metrics(None),
            about={},
            measure=self._measure,
            publish=self._publish_out,
            watch=self.watch,
            clock=self.clock,
        )  # fmt: skip

    def _joint(self, total: int) -> Joint | None:
        """Where the trainee wants its target to learn too."""
        if getattr(self.trainee, "backbone", None) is None:
            return None
        if self.plan.data.cache is not None:
            raise ForedraftError("a target that learns too has no traces to keep; leave --cache out")
        warmup = getattr(self.trainee, "warmup_heads", None)
        loss = getattr(self.config, "loss", "kl")
        live = LiveTarget.of(self.llm.target, self.trainee.taps)
        return Joint(self.trainee, live, loss, round(WARMUP * total) if warmup is None else int(warmup))

    def _networks(self) -> tuple[dict[str, nn.Module], list[Group]]:
        """What is trained, on its device and in float32, the same in every process."""
        networks: dict[str, nn.Module] = {"drafter": self.trainee.network.to(self.place.device).train()}
        rates = {"drafter": 1.0}
        if self.joint is not None:
            networks["target"], rates["target"] = self.joint.live.model, float(getattr(self.trainee, "backbone", 0.0))
        for network in networks.values():
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            self.place.share(tensor.data for tensor in network.state_dict().values())
        return networks, [Group.of(network, rates[name]) for name, network in networks.items()]

    def _source(self, windows: Windows) -> Source:
        plan, source = self.plan, Live(windows, self.tracer)
        if plan.data.cache is not None:
            cache = Cache(Path(plan.data.cache), windows, self.tracer, {
                "target": self.target_facts, "taps": self.tracer.taps, "top": self.tracer.top,
                "text": digest(self.documents), "context": plan.data.context,
            })  # fmt: skip
            if self.place.is_main:
                cache.fill(self.say)
            self.place.wait()
            return cache
        share = getattr(self.trainee, "on_policy", 0.0)
        if not share:
            return source
        policy: Any = self.trainee
        return OnPolicy(source, windows, self.tracer, share, plan.steps.seed, policy.policy)

    def _loss(self, trace: Trace, step: int) -> Losses:
        return self.trainee.loss(trace)

    def _evaluator_of(self, llm: LLM, tracer: Tracer) -> Evaluator:
        plan = self.plan
        return Evaluator(llm, plan.method, plan.evaluation, self.held, plan.data.context, tracer)

    def _now(self) -> Evaluator:
        """Measures against the target as it is: a copy, where it learns too."""
        if self.joint is None:
            return self.evaluator
        llm = self.joint.llm(self.llm.target.model.dtype, self.llm.tokenizer)
        return self._evaluator_of(llm, Tracer(llm.target, self.trainee.taps, self.tracer.top))

    def _publish_out(self) -> None:
        self._publish(self.plan.out, self._now())
        if self.joint is not None:
            self.joint.save(self.plan.out, self.llm.target.model.dtype, self.llm.tokenizer)

    def _publish(self, folder: Path, evaluator: Evaluator) -> None:
        """What can be drafted with; a trainee may first look at held-out text, for the trees it drafts."""
        finish = getattr(self.trainee, "finish", None)
        traces = evaluator.traces() if finish is not None else []
        if finish is not None and traces:
            finish(traces)
        target: str | None = self.llm.target.name
        about: dict[str, Any] = {identity.KEY: identity.norms(evaluator.llm.target.embedding)}
        if self.joint is not None:  # the heads are for the target that learnt with them
            target, about = None, about | {identity.BESIDE: FOLDER, NAME: FOLDER}
        publish(self.trainee, self.plan.method, folder, self.llm.target.model.dtype, target, about)

    def _measure(self) -> dict[str, Any]:
        evaluator = self._now()
        with self.place.autocast():
            found: dict[str, Any] = evaluator.loss(self.trainee.loss)
        return found | evaluator.acceptance(lambda folder: self._publish(folder, evaluator))


@dataclass(frozen=True)
class Live:
    """Traces made when they are read."""

    windows: Windows
    tracer: Tracer

    def read(self, rows: Sequence[int], step: int) -> Trace:
        return self.tracer.trace(*self.windows.read(rows))


def _fingerprint(target: HFModel) -> dict[str, Any]:
    """Of the target, without reading all of it: a name may stay while the weights change."""
    sample = target.embedding[:: max(1, len(target.embedding) // 64)].double()
    return {
        "parameters": target.num_parameters,
        "vocab_size": target.vocab_size,
        "sum": float(f"{float(sample.sum()):.9g}"),
    }
