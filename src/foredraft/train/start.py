"""Start of a run: a new drafter in training, or one from a folder."""

from pathlib import Path
from typing import Any

from foredraft.checkpoints.schema import TargetInfo
from foredraft.drafters import checkpoint_folders
from foredraft.drafters.trainee import Trainee
from foredraft.errors import ForedraftError
from foredraft.train.job import TrainJob


def create_trainee(job: TrainJob) -> Trainee:
    """Create the drafter in training, from the folder that the plan names, or with new weights.

    Raises:
        ForedraftError: if the folder holds no drafter of this method and target, or one of other sizes than the plan.
    """
    trainee = make_trainee(job)
    if job.plan.start is None and trainee.spec.prepare is not None:
        trainee.spec.prepare(job.count_loss_tokens())
    return trainee


def make_trainee(job: TrainJob) -> Trainee:
    """Make the drafter in training without the counts of tokens that `create_trainee` adds. Raises as it does."""
    assert job.training.create_trainee is not None
    start = _load_start(job)
    trainee = job.training.create_trainee(job.config, job.llm.target, start)
    if start is not None:
        _check_shape_settings(job, trainee)
    return trainee


def _load_start(job: TrainJob) -> Any:
    """Return the checkpoint to start from, its folder if it is a whole model, or None."""
    folder, target = job.plan.start, job.llm.target
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise ForedraftError(f"--start {folder!r} is not a folder; give one that holds a drafter")
    stored, method = checkpoint_folders.recognise(folder, job.method)[0], job.method
    if stored == method.name and method.checkpoint is not None and not method.checkpoint.has_reader:
        return Path(folder)
    info = TargetInfo(target.name, target.hidden_size, target.vocab_size, target.num_layers)
    return checkpoint_folders.read(folder, info, method)


def _check_shape_settings(job: TrainJob, trainee: Trainee) -> None:
    """Raise ForedraftError if the user set a size that differs from that of the drafter to start from."""
    fixed = job.config.read_shape(trainee.network)
    for name in job.plan.settings or ():
        if name in fixed and fixed[name] != vars(job.config)[name]:
            raise ForedraftError(
                f"--start {job.plan.start!r} has {name}={fixed[name]}, not {vars(job.config)[name]}; leave --set "
                f"{name} out, or train without --start"
            )
