"""Small heads on the target's states, fitted for seconds to the tiny target's own text: now right, now wrong.

The target is close to chaotic, and no head of this size foresees it; so they learn by heart how it goes on from a few of
the prompts that the laws use, and from others no more than a tendency.
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch

import models_made
from foredraft import Sampling
from foredraft.checkpoints.base import Checkpoint
from foredraft.drafters import medusa, mlp_speculator
from foredraft.drafters.base import Context, Drafter
from foredraft.drafters.training import Trace
from foredraft.models.window import NORMED
from foredraft.train.trace import Tracer

TAUGHT = [[33], [44, 45], [50] * 5, [61, 62, 63, 64, 61, 62], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]]
STEPS, LENGTH = 60, 28


@cache
def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """What the target says after prompts, greedily and not: tokens, and which of them to learn."""
    greedy = Sampling(max_tokens=LENGTH, temperature=0, ignore_eos=True)
    sampled = Sampling(
        max_tokens=LENGTH, temperature=0.6, top_p=0.9, repetition_penalty=1.05, frequency_penalty=0.05,
        presence_penalty=0.1, seed=11, ignore_eos=True,
    )  # fmt: skip
    found = []
    for prompts, sampling in ((TAUGHT, greedy), (TAUGHT, sampled), ([[i] for i in range(70, 86)], sampled)):
        done = models_made.plain().generate(prompts, sampling)
        found += [[*prompt, *c.token_ids] for prompt, c in zip(prompts, done, strict=True)]
    tokens = torch.tensor([text[-LENGTH - 1 :] for text in found])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    return tokens, mask


@cache
def trace() -> Trace:
    """The same with the target's states."""
    return Tracer(models_made.plain().target, (NORMED,)).trace(*texts())


def fitted(module: ModuleType, **options: Any) -> Checkpoint:
    torch.manual_seed(0)
    trainee = module.trainee(module.TrainConfig(loss="ce", **options), models_made.plain().target)
    optimizer = torch.optim.Adam(trainee.network.parameters(), 2e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        trainee.loss(trace()).total.backward()
        optimizer.step()
    tensors = {name: tensor.detach() for name, tensor in trainee.network.state_dict().items()}
    return Checkpoint(module.METHOD, "fitted", "fitted heads", trainee.network.shape, tensors)


@cache
def heads() -> Checkpoint:
    return fitted(medusa, heads=4, layers=2)


@cache
def speculator() -> Checkpoint:
    return fitted(mlp_speculator, n_predict=4, inner=48, tied=False)


def context(num_tokens: int) -> Context:
    target = models_made.plain().target
    return Context(vocab_size=models_made.VOCAB, target=target, num_tokens=num_tokens, dtype=torch.float64)


def medusa_drafter(num_tokens: int, **options: Any) -> Drafter:
    return medusa.from_checkpoint(medusa.Config(**options), heads(), context(num_tokens))


def speculator_drafter(num_tokens: int, **options: Any) -> Drafter:
    return mlp_speculator.from_checkpoint(mlp_speculator.Config(**options), speculator(), context(num_tokens))
