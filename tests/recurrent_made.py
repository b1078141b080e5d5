"""EAGLE heads fitted for seconds to the tiny target's own text, as those of `heads_made`."""

from functools import cache
from types import ModuleType
from typing import Any

import torch

import models_made
from foredraft.checkpoints.base import Checkpoint
from foredraft.drafters import eagle, eagle3
from foredraft.drafters.base import Drafter
from foredraft.drafters.training import Trace
from foredraft.train.trace import Tracer
from heads_made import context, texts

STEPS = 60


@cache
def trace(taps: tuple[int, ...]) -> Trace:
    tokens, mask = texts()
    return Tracer(models_made.plain().target, taps).trace(tokens, mask)


def fitted(module: ModuleType, **options: Any) -> Checkpoint:
    trainee = module.trainee(module.TrainConfig(loss="ce", **options), models_made.plain().target)
    torch.manual_seed(0)
    if hasattr(trainee, "prepare"):
        trainee.prepare(torch.bincount(texts()[0].flatten(), minlength=models_made.VOCAB))
    optimizer = torch.optim.Adam(trainee.network.parameters(), 1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        trainee.loss(trace(trainee.taps)).total.backward()
        optimizer.step()
    tensors = {name: tensor.detach() for name, tensor in trainee.network.state_dict().items()}
    return Checkpoint(module.METHOD, "fitted", "a fitted head", trainee.network.shape, tensors)


@cache
def head() -> Checkpoint:
    return fitted(eagle, noise=0.0, steps=2)


@cache
def head3(draft_vocab_size: int | None = None) -> Checkpoint:
    return fitted(eagle3, taps=(1,), steps=2, draft_vocab_size=draft_vocab_size)


def eagle_drafter(num_tokens: int, **options: Any) -> Drafter:
    return eagle.from_checkpoint(eagle.Config(**options), head(), context(num_tokens))


def eagle3_drafter(num_tokens: int, draft_vocab_size: int | None = None, **options: Any) -> Drafter:
    return eagle3.from_checkpoint(eagle3.Config(**options), head3(draft_vocab_size), context(num_tokens))
