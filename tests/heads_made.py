"""Small heads on the target's states, fitted for seconds to a tiny target's own text: now right, now wrong.

The target is close to chaotic, and no head of this size foresees it; so they learn by heart how it goes on from a few
of the prompts that the laws use, and from others no more than a tendency.
"""

from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch

import models_made
from foredraft import LLM, Sampling
from foredraft.checkpoints.base import Checkpoint
from foredraft.drafters import blockwise, chimera, eagle, eagle3, early_exit, hydra, medusa, mlp_speculator
from foredraft.drafters.base import Context, Drafter
from foredraft.drafters.training import Trace
from foredraft.train.trace import Tracer

TAUGHT = [[33], [44, 45], [50] * 5, [61, 62, 63, 64, 61, 62], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]]
STEPS, LENGTH = 60, 28


@cache
def texts(llm: LLM) -> tuple[torch.Tensor, torch.Tensor]:
    """What the target says after prompts, greedily and not: tokens, and which of them to learn."""
    greedy = Sampling(max_tokens=LENGTH, temperature=0, ignore_eos=True)
    sampled = Sampling(
        max_tokens=LENGTH, temperature=0.6, top_p=0.9, repetition_penalty=1.05, frequency_penalty=0.05,
        presence_penalty=0.1, seed=11, ignore_eos=True,
    )  # fmt: skip
    found = []
    for prompts, sampling in ((TAUGHT, greedy), (TAUGHT, sampled), ([[i] for i in range(70, 86)], sampled)):
        done = llm.generate(prompts, sampling)
        found += [[*prompt, *c.token_ids] for prompt, c in zip(prompts, done, strict=True)]
    tokens = torch.tensor([text[-LENGTH - 1 :] for text in found])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    return tokens, mask


@cache
def trace(llm: LLM, taps: tuple[int, ...]) -> Trace:
    """The same with the target's states."""
    return Tracer(llm.target, taps).trace(*texts(llm))


@dataclass(frozen=True)
class Head:
    """How a method's head is fitted and drafted with."""

    module: ModuleType
    rate: float
    training: tuple[tuple[str, Any], ...]
    fits: dict[LLM, Checkpoint] = field(default_factory=dict)

    @classmethod
    def of(cls, module: ModuleType, rate: float, **training: Any) -> "Head":
        return cls(module, rate, tuple(training.items()))

    def checkpoint(self, llm: LLM) -> Checkpoint:
        if llm not in self.fits:
            self.fits[llm] = self._fitted(llm)
        return self.fits[llm]

    def _fitted(self, llm: LLM) -> Checkpoint:
        torch.manual_seed(0)
        module = self.module
        trainee = module.trainee(module.TrainConfig(loss="ce", **dict(self.training)), llm.target)
        torch.manual_seed(0)
        if hasattr(trainee, "prepare"):
            trainee.prepare(torch.bincount(texts(llm)[0].flatten(), minlength=models_made.VOCAB))
        optimizer = torch.optim.Adam(trainee.network.parameters(), self.rate)
        for _ in range(STEPS):
            optimizer.zero_grad()
            trainee.loss(trace(llm, trainee.taps)).total.backward()
            optimizer.step()
        tensors = {name: tensor.detach() for name, tensor in trainee.network.state_dict().items()}
        return Checkpoint(module.METHOD, "fitted", "a fitted head", trainee.network.shape, tensors)

    def drafter(self, num_tokens: int, llm: LLM | None = None, **options: Any) -> Drafter:
        """Beside a target, the tiny one in float64 if none is given."""
        llm = llm or models_made.plain()
        context = Context(
            vocab_size=models_made.VOCAB, target=llm.target, num_tokens=num_tokens, dtype=llm.target.model.dtype
        )
        return self.module.from_checkpoint(self.module.Config(**options), self.checkpoint(llm), context)


EAGLE = Head.of(eagle, 1e-2, noise=0.0, steps=2)
EAGLE3 = Head.of(eagle3, 1e-2, taps=(1,), steps=2)
EAGLE3_FEW = Head.of(eagle3, 1e-2, taps=(1,), steps=2, draft_vocab_size=60)
MEDUSA = Head.of(medusa, 2e-2, heads=4, layers=2)
SPECULATOR = Head.of(mlp_speculator, 2e-2, n_predict=4, inner=48, tied=False)
CHIMERA = Head.of(chimera, 1e-2, taps=(1, -1), steps=4, heads=2)
CHIMERA_ONE_TAP = Head.of(chimera, 1e-2, taps=(1,), steps=3, heads=1)
EARLY_EXIT = Head.of(early_exit, 1e-2, exit_layer=1, rank=24)
BLOCKWISE = Head.of(blockwise, 1e-2, heads=4, inner=16)
HYDRA = Head.of(hydra, 2e-2, heads=4)
HYDRA_PREFIX = Head.of(hydra, 1e-2, heads=4, prefix=True)
HYDRA_LEAN = Head.of(hydra, 2e-2, heads=4, layers=2, own_head=False, rank=24)
