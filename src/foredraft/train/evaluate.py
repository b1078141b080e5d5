"""Evaluation of a drafter in training: loss on held-out documents, and replayed acceptance after held-out prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foredraft.drafters.losses import Losses, Trace
from foredraft.llm import LLM
from foredraft.train.config import EvaluationConfig
from foredraft.train.documents import Document
from foredraft.train.prompts import TrainPrompt, make_prompt
from foredraft.train.replay import REGIMES, Recording, Replay, ReplayMetrics
from foredraft.train.trace import Tracer
from foredraft.train.windows import TokenWindows

EVAL_ROWS = 16  # held-out rows that the loss is measured on
EVAL_BATCH_ROWS = 4  # rows traced in one batch
MAX_PROMPT_TOKENS = 64  # length of a plain-text prompt
MAX_CHAT_PROMPT_FACTOR = 4  # a chat prompt longer than this many plain-text prompts is cropped at its beginning


def select_prompts(documents: Sequence[Document], count: int, length: int) -> list[TrainPrompt]:
    """Select distinct prompts from held-out documents, spread evenly over them.

    Args:
        documents: Held-out documents. A chat gives its prompt; plain text gives a passage from a random position.
        count: Maximum number of prompts.
        length: Tokens of a passage.
    """
    prompts: dict[tuple[tuple[int, ...] | None, tuple[int, ...]], TrainPrompt] = {}  # by source and ids
    rng = np.random.default_rng(0)
    for i in range(count if documents else 0):
        document = documents[i % len(documents)] if count > len(documents) else documents[i * len(documents) // count]
        if document.completion_mask is not None:
            prompt = (
                document.prompt[-length:] if len(document.prompt) > MAX_CHAT_PROMPT_FACTOR * length else document.prompt
            )
        else:
            start = int(rng.integers(max(len(document.ids) - length, 1)))
            prompt = document.ids[start : start + length].tolist()
        if prompt:
            prompts.setdefault((document.source, tuple(prompt)), make_prompt(prompt, document.source))
    return list(prompts.values())


@dataclass
class Evaluator:
    """Evaluator of a drafter in training. Recordings of the target are made once and reused."""

    llm: LLM
    method: str
    evaluation: EvaluationConfig
    held_out: Sequence[Document]
    context: int
    tracer: Tracer
    _recordings: dict[str, Recording] = field(default_factory=dict)

    def trace_held_out(self) -> list[Trace]:
        """Trace a few rows of held-out documents; an empty list if there are none."""
        # The other documents have no token to learn.
        usable = [document for document in self.held_out if document.loss_mask.any()]
        if not usable:
            return []
        windows = TokenWindows.pack(usable, self.context)
        rows = sorted({i * len(windows) // EVAL_ROWS for i in range(EVAL_ROWS)})
        batches = [rows[i : i + EVAL_BATCH_ROWS] for i in range(0, len(rows), EVAL_BATCH_ROWS)]
        return [self.tracer.trace_rows(windows, batch) for batch in batches]

    def measure_loss(self, compute_loss: Callable[[Trace], Losses]) -> dict[str, float]:
        """Measure the mean loss of the current drafter per token to learn; {} without held-out documents."""
        total, num_learnt = 0.0, 0.0
        for trace in self.trace_held_out():
            count = float(trace.mask.sum())
            total += count * compute_loss(trace).total.item()
            num_learnt += count
        return {"loss": round(total / num_learnt, 5)} if num_learnt else {}

    def replay(self, folder: Path) -> dict[str, Any]:
        """Measure the acceptance of a drafter in a folder.

        Returns:
            Acceptance length and acceptance by position, for every regime of REGIMES; {} without held-out prompts.
        """
        results: dict[str, Any] = {}
        if not self.evaluation.prompts or not self.held_out:
            return results
        for regime, temperature in REGIMES.items():
            if regime not in self._recordings:
                max_prompt = min(MAX_PROMPT_TOKENS, self.llm.target.context_length - self.evaluation.tokens - 1)
                prompts = select_prompts(self.held_out, self.evaluation.prompts, max(max_prompt, 1))
                self._recordings[regime] = Recording.make(self.llm, prompts, temperature, self.evaluation.tokens)
            spec = {"method": self.method, "model": str(folder)}
            drafting = self.llm.with_drafter(spec, self.evaluation.num_tokens, "auto")
            if drafting.drafter is not None:  # in training its acceptance may be low, though it is for this target
                drafting.drafter.spec.silence_mismatch()
            metrics = ReplayMetrics.from_stats(Replay(drafting, self._recordings[regime]).run())
            length, positions = metrics.acceptance_length, metrics.per_position
            results[regime] = {"length": round(length, 4), "positions": [round(share, 4) for share in positions]}
        return results
