"""Job of a training run: plan, method, target and data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.drafters.method import Method, Training
from foredraft.llm import LLM
from foredraft.train.config import TrainPlan
from foredraft.train.distributed import DistributedContext
from foredraft.train.documents import Document, digest
from foredraft.train.evaluate import Evaluator
from foredraft.train.fingerprint import fingerprint_target
from foredraft.train.trace import Tracer

LogLine = Callable[[str], None]


@dataclass(frozen=True)
class TrainJob:
    """Plan of a run with all that was loaded for it."""

    plan: TrainPlan
    method: Method
    training: Training
    config: Any  # settings of the method, an instance of `training.config`
    distributed: DistributedContext
    llm: LLM  # the target, without a drafter
    documents: Sequence[Document]
    held_out: Sequence[Document]
    log_line: LogLine

    @cached_property
    def target_fingerprint(self) -> dict[str, Any]:
        """Numbers that identify the target's weights."""
        return fingerprint_target(self.llm.target)

    @cached_property
    def text_digest(self) -> str:
        """Hash of the documents."""
        return digest(self.documents)

    def make_identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the run that stopped."""
        return self.plan.make_identity(target=self.target_fingerprint, text=self.text_digest)

    def make_evaluator(self, llm: LLM, tracer: Tracer) -> Evaluator:
        """Make an evaluator of drafters for a state of the target."""
        plan = self.plan
        return Evaluator(llm, plan.method, plan.evaluation, self.held_out, plan.data.context, tracer)

    def count_loss_tokens(self) -> Tensor:
        """Count [V] how often each token is learnt."""
        counts = np.zeros(self.llm.target.vocab_size, dtype=np.int64)
        for document in self.documents:
            counts += np.bincount(document.ids[document.loss_mask].astype(np.int64), minlength=len(counts))
        return torch.from_numpy(counts)
