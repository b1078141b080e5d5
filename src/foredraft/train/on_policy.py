"""Text from the draft itself, scored by the target: what it learns there is what it will be asked (DistillSpec)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft import LLM, Sampling
from foredraft.drafters.losses import Trace
from foredraft.models.native.decoder import get_obstacle
from foredraft.train.loop import TraceSource
from foredraft.train.trace import Tracer
from foredraft.train.windows import TokenWindows


@dataclass(frozen=True)
class OnPolicySource:
    """A source whose steps are, in a share of cases, half the data's rows and half the draft's own continuation."""

    source: TraceSource
    windows: TokenWindows
    tracer: Tracer
    share: float
    seed: int
    make_policy: Callable[[], Any]  # a model to sample from, as the draft is now

    def read(self, rows: Sequence[int], step: int) -> Trace:
        # by the number of the step: a run that is taken up again chooses the same
        if np.random.default_rng((self.seed, step)).random() >= self.share:
            return self.source.read(rows, step)
        return self.tracer.trace(*self.continue_rows(*self.windows.read(rows), step))

    def continue_rows(self, tokens: Tensor, mask: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """[B, L + 1] tokens and mask with the second half said by the draft, up to an end of text."""
        model = self.make_policy()
        is_native = model.device.type == "cpu" and get_obstacle(model) is None
        llm = LLM(model, None, tokenizer=None, fused=True if is_native else None)
        half = tokens.shape[1] // 2
        samplings = [
            Sampling(temperature=1.0, max_tokens=tokens.shape[1] - half, seed=(self.seed + step) * len(tokens) + row)
            for row in range(len(tokens))
        ]
        tokens, mask = tokens.clone(), mask.clone()
        tokens[:, half:], mask[:, half:] = 0, False
        for row, answer in enumerate(llm.generate([row[:half].tolist() for row in tokens], samplings)):
            said = answer.token_ids
            tokens[row, half : half + len(said)] = torch.tensor(said)
            mask[row, half : half + len(said)] = True
        return tokens, mask
