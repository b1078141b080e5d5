"""Small heads on the target's states, fitted for seconds to a tiny target's own text: now right, now wrong.

The target is close to chaotic, and no head of this size foresees it; so they learn by heart how it goes on from a few
of the prompts that the invariants use, and from others no more than a tendency.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from foredraft import LLM, Sampling
from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.interface import Drafter
from foredraft.drafters.losses import Trace
from foredraft.drafters.method import DrafterContext, Method
from foredraft.drafters.registry import load_methods
from foredraft.train.trace import Tracer
from tests.support import tiny_models
from tests.support.fit_cache import fit_once

TRAIN_PROMPTS = [[33], [44, 45], [50] * 5, [61, 62, 63, 64, 61, 62], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]]
STEPS, LENGTH = 60, 28


@cache
def generate_texts(llm: LLM) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate texts with the target, greedy and sampled: tokens, and the mask of those to learn."""
    greedy = Sampling(max_tokens=LENGTH, temperature=0, ignore_eos=True)
    sampled = Sampling(
        max_tokens=LENGTH, temperature=0.6, top_p=0.9, repetition_penalty=1.05, frequency_penalty=0.05,
        presence_penalty=0.1, seed=11, ignore_eos=True,
    )  # fmt: skip
    found = []
    for prompts, sampling in (
        (TRAIN_PROMPTS, greedy),
        (TRAIN_PROMPTS, sampled),
        ([[i] for i in range(70, 86)], sampled),
    ):
        done = llm.generate(prompts, sampling)
        found += [[*prompt, *c.token_ids] for prompt, c in zip(prompts, done, strict=True)]
    tokens = torch.tensor([text[-LENGTH - 1 :] for text in found])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0] = False
    return tokens, mask


@cache
def make_trace(llm: LLM, taps: tuple[int, ...]) -> Trace:
    """Make a trace: texts with the target's states."""
    return Tracer(llm.target, taps).trace(*generate_texts(llm))


@dataclass(frozen=True)
class HeadCase:
    """How a method's head is fitted and drafted with."""

    method: Method
    rate: float
    training: tuple[tuple[str, Any], ...]
    fits: dict[LLM, Checkpoint] = field(default_factory=dict)

    @classmethod
    def from_options(cls, method: str, rate: float, **training: Any) -> "HeadCase":
        return cls(load_methods()[method], rate, tuple(training.items()))

    def get_checkpoint(self, llm: LLM) -> Checkpoint:
        if llm not in self.fits:
            self.fits[llm] = self._fit(llm)
        return self.fits[llm]

    def _fit(self, llm: LLM) -> Checkpoint:
        torch.manual_seed(0)
        training = self.method.training
        assert training is not None
        assert training.create_trainee is not None
        config = training.config(loss="ce", **dict(self.training))
        trainee: Any = training.create_trainee(config, llm.target, None)
        torch.manual_seed(0)
        if trainee.spec.prepare is not None:
            trainee.spec.prepare(torch.bincount(generate_texts(llm)[0].flatten(), minlength=tiny_models.VOCAB))
        target = llm.target
        inputs = {"embedding": target.embedding, "head": target.head_weight}  # the layers may be in several processes
        key = f"{self.method.name} {self.rate} {self.training} {target.num_parameters} {target.num_layers}"
        tensors = fit_once(key, inputs, lambda: self._learn(llm, trainee))
        return Checkpoint(self.method.name, "fitted", "a fitted head", trainee.network.shape, tensors)

    def _learn(self, llm: LLM, trainee: Any) -> dict[str, torch.Tensor]:
        """Train the head for some steps; return its weights."""
        optimizer = torch.optim.Adam(trainee.network.parameters(), self.rate)
        for _ in range(STEPS):
            optimizer.zero_grad()
            trainee.compute_loss(make_trace(llm, trainee.spec.hidden_layers)).total.backward()
            optimizer.step()
        return dict(trainee.network.state_dict())

    def make_drafter(self, num_tokens: int, llm: LLM | None = None, **options: Any) -> Drafter:
        """Beside a target, the tiny one in float64 if none is given."""
        llm = llm or tiny_models.plain()
        context = DrafterContext(
            vocab_size=tiny_models.VOCAB,
            target=llm.target,
            num_speculative_tokens=num_tokens,
            dtype=llm.target.model.dtype,
            device=llm.target.device,
        )
        fitted = llm if llm.target.device.type == "cpu" else tiny_models.plain()  # heads are fitted on the CPU
        assert self.method.from_checkpoint is not None
        return self.method.from_checkpoint(self.method.config(**options), self.get_checkpoint(fitted), context)


EAGLE = HeadCase.from_options("eagle", 1e-2, noise=0.0, steps=2)
EAGLE3 = HeadCase.from_options("eagle3", 1e-2, taps=(1,), steps=2)
DFLASH = HeadCase.from_options("dflash", 2e-2, taps=(1,), block_size=5, num_layers=1)
EAGLE3_FEW = HeadCase.from_options("eagle3", 1e-2, taps=(1,), steps=2, draft_vocab_size=60)
MEDUSA = HeadCase.from_options("medusa", 2e-2, heads=4, layers=2)
SPECULATOR = HeadCase.from_options("mlp_speculator", 2e-2, n_predict=4, inner=48, tied=False)
CHIMERA = HeadCase.from_options("chimera", 1e-2, taps=(1, -1), steps=4, heads=2)
CHIMERA_ONE_TAP = HeadCase.from_options("chimera", 1e-2, taps=(1,), steps=3, heads=1)
EARLY_EXIT = HeadCase.from_options("early_exit", 1e-2, exit_layer=1, rank=24)
BLOCKWISE = HeadCase.from_options("blockwise", 1e-2, heads=4, inner=16)
HYDRA = HeadCase.from_options("hydra", 2e-2, heads=4)
HYDRA_PREFIX = HeadCase.from_options("hydra", 1e-2, heads=4, prefix=True)
HYDRA_LEAN = HeadCase.from_options("hydra", 2e-2, heads=4, layers=2, own_head=False, rank=24)
