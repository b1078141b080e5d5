"""On-policy training data: sequences that the draft model wrote, with the distributions of the target.

The draft learns on the sequences that it will be verified on. Reference: DistillSpec, 2310.08461.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.drafters.losses import Trace
from foredraft.llm import LLM
from foredraft.models.native.decoder import explain_unsupported
from foredraft.sampling.params import Sampling
from foredraft.source import EncoderSource, PreparedPrompt
from foredraft.train.learner import TraceSource
from foredraft.train.prompts import TrainPrompt, get_ids
from foredraft.train.trace import Tracer
from foredraft.train.windows import TokenWindows


@dataclass(frozen=True)
class OnPolicySource:
    """Source of traces in which the draft continues the data's rows in a share of the steps."""

    source: TraceSource
    windows: TokenWindows
    tracer: Tracer
    share: float  # share of the steps, 0 to 1
    seed: int
    make_policy: Callable[[], Any]  # makes a model to sample from, with the current weights of the draft

    def read(self, rows: Sequence[int], step: int) -> Trace:
        # The choice depends only on seed and step, so a resumed run makes the same choices.
        if np.random.default_rng((self.seed, step)).random() >= self.share:
            return self.source.read(rows, step)
        tokens, mask, sources = self.windows.read_with_sources(rows)
        return self.tracer.trace(*self.continue_rows(tokens, mask, step, sources), sources)

    def continue_rows(
        self, tokens: Tensor, mask: Tensor, step: int, sources: tuple[EncoderSource, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Replace the second half of every row by the continuation of the draft, up to an end-of-text token.

        With sources, the draft continues the decoder's first tokens instead of half a row.

        Args:
            tokens: [B, L + 1] token ids.
            mask: [B, L + 1] tokens to learn.
            step: Number of the step, for the seeds.
            sources: B sources of an encoder-decoder model. Default () = a decoder alone.

        Returns:
            Tokens and mask of the same shapes; only sampled tokens are learnt.
        """
        model = self.make_policy()
        is_native = model.device.type == "cpu" and explain_unsupported(model) is None
        llm = LLM(model, None, tokenizer=None, fused=True if is_native else None)
        # With sources a row is learnt from the first token that the decoder writes.
        starts = [int(row.nonzero()[0]) if sources else len(row) // 2 for row in mask]
        samplings = [
            Sampling(temperature=1.0, max_tokens=tokens.shape[1] - start, seed=(self.seed + step) * len(tokens) + row)
            for row, start in enumerate(starts)
        ]
        prompts: list[TrainPrompt] = [row[:start].tolist() for row, start in zip(tokens, starts, strict=True)]
        if sources:
            prompts = [PreparedPrompt(*pair) for pair in zip(sources, map(get_ids, prompts), strict=True)]
        tokens, mask = tokens.clone(), mask.clone()
        for row, (start, answer) in enumerate(zip(starts, llm.generate(prompts, samplings), strict=True)):
            sampled, stop = answer.token_ids, start + len(answer.token_ids)
            tokens[row, start:], mask[row, start:] = 0, False
            tokens[row, start:stop] = torch.tensor(sampled)
            mask[row, start:stop] = True
        return tokens, mask
