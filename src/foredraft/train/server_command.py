"""The command of a vLLM that exports the layers which a run reads."""

import os
from pathlib import Path

from foredraft.drafters.trainee import TraineeSpec
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.models.loading import load_tokenizer
from foredraft.train.config import TrainPlan
from foredraft.train.distributed import DistributedContext
from foredraft.train.job import TrainJob
from foredraft.train.remote.target import TableTarget
from foredraft.train.remote.vllm_export import list_exports, make_vllm_command
from foredraft.train.settings import find_trainable, parse_train_config, require_training
from foredraft.train.start import make_trainee


def make_server_command(plan: TrainPlan, folder: Path) -> str:
    """Make the shell command of the vLLM that `--target-url` reads. Only the tables of the target are loaded.

    Args:
        plan: Settings of the run.
        folder: Folder for the files of hidden states, which trainer and vLLM must both see.

    Raises:
        ForedraftError: if the plan is invalid, or its method needs the layers of the target in its own process.
    """
    method = find_trainable(plan.method)
    training = require_training(method)
    config = parse_train_config(training, plan.settings or {})
    distributed = DistributedContext.detect(plan.device, plan.precision)
    target = TableTarget.load_tables(plan.model, plan.dtype, distributed.device)
    spec = TraineeSpec()
    if training.create_trainee is not None:
        llm = LLM(target, None, tokenizer=load_tokenizer(target.name, target.vocab_size))
        spec = make_trainee(TrainJob(plan, method, training, config, distributed, llm, (), (), _ignore)).spec
    if spec.joint is not None:
        raise ForedraftError("a target that is trained too must be here, not on a server; leave backbone out")
    return make_vllm_command(target.name, list_exports(spec.hidden_layers, target.num_layers), os.path.abspath(folder))


def _ignore(line: str) -> None:
    return
