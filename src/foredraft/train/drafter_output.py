"""Output of a run: the current drafter as files, and its evaluation."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.checkpoints import target_identity
from foredraft.checkpoints.target_reference import TARGET_NAME_KEY
from foredraft.drafters.trainee import Trainee
from foredraft.train.evaluate import Evaluator
from foredraft.train.job import TrainJob
from foredraft.train.publish import publish
from foredraft.train.trace import Tracer
from foredraft.train.with_target import TARGET_FOLDER, JointLoss, make_llm, save_target

EVALUATION_FOLDER = "evaluation"  # subfolder of the run, for a drafter that several processes evaluate together


@dataclass(frozen=True)
class DrafterOutput:
    """Publishes and measures a drafter in training."""

    job: TrainJob
    trainee: Trainee
    evaluator: Evaluator  # of the original target
    joint_loss: JointLoss | None  # None = the target is frozen

    def publish(self) -> None:
        """Write the current drafter into the folder of the run, and the target if it is trained too."""
        folder, evaluator = self.job.plan.out, self.evaluator
        if self.joint_loss is not None:
            model = self._build_target(self.joint_loss)
            save_target(model, folder, self.job.llm.tokenizer)
            evaluator = self._make_evaluator(model)
        self._write(folder, evaluator)

    def measure(self) -> Mapping[str, Any]:
        """Measure loss and acceptance of the current drafter on held-out documents."""
        evaluator, metrics = self.evaluator, dict[str, Any]()
        if self.joint_loss is not None:
            with self.job.distributed.autocast():
                metrics |= self.joint_loss.target.measure(evaluator.trace_held_out())
            evaluator = self._make_evaluator(self._build_target(self.joint_loss))
        with self.job.distributed.autocast():
            metrics |= evaluator.measure_loss(self.trainee.compute_loss)
        with self._make_evaluation_folder() as folder:
            self._write(folder, evaluator)
            self._wait()
            return metrics | evaluator.replay(folder)

    @contextlib.contextmanager
    def _make_evaluation_folder(self) -> Iterator[Path]:
        """Make a folder for the current drafter. Processes that evaluate together share it."""
        if self.job.distributed.sharding is None:
            with tempfile.TemporaryDirectory() as temporary:
                yield Path(temporary)
            return
        folder = self.job.plan.out / EVALUATION_FOLDER
        try:
            yield folder
        finally:
            self._wait()
            shutil.rmtree(folder, ignore_errors=True)

    def _wait(self) -> None:
        """Wait for the processes that evaluate together."""
        if self.job.distributed.sharding is not None:
            self.job.distributed.wait()

    def _build_target(self, joint_loss: JointLoss) -> Any:
        return joint_loss.target.build_model(self.job.llm.target.model.dtype)

    def _make_evaluator(self, model: Any) -> Evaluator:
        """Make an evaluator with a copy of the target in training."""
        llm = make_llm(model, self.job.llm.tokenizer)
        tracer = Tracer(llm.target, self.trainee.spec.hidden_layers, self.evaluator.tracer.top)
        return self.job.make_evaluator(llm, tracer)

    def _write(self, folder: Path, evaluator: Evaluator) -> None:
        """Write the current drafter, after its spec's `finish` has seen held-out documents.

        With a sharded target every process must call this, since `finish` needs passes; only the main process writes.
        """
        finish = self.trainee.spec.finish
        traces = evaluator.trace_held_out() if finish is not None else []
        if finish is not None and traces:
            finish(traces)
        if not self.job.distributed.is_main:
            return
        target: str | None = self.job.llm.target.name
        extra_config: dict[str, Any] = {
            target_identity.NORMS_KEY: target_identity.compute_norms(evaluator.llm.target.embedding)
        }
        if self.joint_loss is not None:  # the heads fit only the target that was trained with them
            target = None
            extra_config |= {target_identity.FOLDER_KEY: TARGET_FOLDER, TARGET_NAME_KEY: TARGET_FOLDER}
        publish(self.trainee, self.job.plan.method, folder, self.job.llm.target.model.dtype, target, extra_config)
