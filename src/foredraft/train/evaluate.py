"""How good a drafter in training is: its loss on held-out text, and its replayed acceptance after held-out prompts."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foredraft import LLM
from foredraft.drafters.losses import Losses, Trace
from foredraft.drafters.mismatch_warning import MismatchDetector
from foredraft.train.config import EvaluationConfig
from foredraft.train.documents import Document
from foredraft.train.replay import REGIMES, Recording, Replay, ReplayMetrics
from foredraft.train.trace import Tracer
from foredraft.train.windows import TokenWindows

EVAL_ROWS = 16  # of held-out text that the loss is measured on
EVAL_BATCH_ROWS = 4


def select_prompts(documents: Sequence[Document], count: int, length: int) -> list[list[int]]:
    """Questions of chats; of plain text a stretch of `length` tokens from anywhere in it. Documents in turn."""
    found: list[list[int]] = []
    rng = np.random.default_rng(0)
    for i in range(count if documents else 0):
        document = documents[i % len(documents)] if count > len(documents) else documents[i * len(documents) // count]
        if document.completion_mask is not None:
            prompt = document.prompt[-length:] if len(document.prompt) > 4 * length else document.prompt
        else:
            start = int(rng.integers(max(len(document.ids) - length, 1)))
            prompt = document.ids[start : start + length].tolist()
        if prompt and prompt not in found:
            found.append(prompt)
    return found


@dataclass
class Evaluator:
    """Everything that does not change while the drafter does is made once."""

    llm: LLM
    method: str
    evaluation: EvaluationConfig
    held_out: Sequence[Document]
    context: int
    tracer: Tracer
    _recordings: dict[str, Recording] = field(default_factory=dict)

    def trace_held_out(self) -> list[Trace]:
        """Trace a few rows of held-out documents; an empty list if there are none."""
        # the others have no token to learn
        usable = [document for document in self.held_out if document.loss_mask.any()]
        if not usable:
            return []
        windows = TokenWindows.pack(usable, self.context)
        rows = sorted({i * len(windows) // EVAL_ROWS for i in range(EVAL_ROWS)})
        parts = [rows[i : i + EVAL_BATCH_ROWS] for i in range(0, len(rows), EVAL_BATCH_ROWS)]
        return [self.tracer.trace(*windows.read(part)) for part in parts]

    def measure_loss(self, compute_loss: Callable[[Trace], Losses]) -> dict[str, float]:
        """Measure the loss of the current drafter, by token to learn."""
        total, learnt = 0.0, 0.0
        for trace in self.trace_held_out():
            weight = float(trace.mask.sum())
            total += weight * compute_loss(trace).total.item()
            learnt += weight
        return {"loss": round(total / learnt, 5)} if learnt else {}

    def measure_acceptance(self, publish: Callable[[Path], None]) -> dict[str, Any]:
        """Acceptance length and acceptance by position, by regime, of what `publish` writes into a folder."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            publish(folder)
            return self.replay(folder)

    def replay(self, folder: Path) -> dict[str, Any]:
        """The same of a drafter in a folder."""
        found: dict[str, Any] = {}
        if not self.evaluation.prompts or not self.held_out:
            return found
        for regime, temperature in REGIMES.items():
            if regime not in self._recordings:
                room = min(64, self.llm.target.context_length - self.evaluation.tokens - 1)
                prompts = select_prompts(self.held_out, self.evaluation.prompts, max(room, 1))
                self._recordings[regime] = Recording.make(self.llm, prompts, temperature, self.evaluation.tokens)
            spec = {"method": self.method, "model": str(folder)}
            drafting = self.llm.with_drafter(spec, self.evaluation.num_tokens, "auto")
            fit: MismatchDetector | None = getattr(drafting.drafter, "mismatch_detector", None)
            if fit is not None:  # a drafter in training is for this target, however weak it still is
                fit.is_silent = True
            figures = ReplayMetrics.from_stats(Replay(drafting, self._recordings[regime]).run())
            length, positions = figures.acceptance_length, figures.per_position
            found[regime] = {"length": round(length, 4), "positions": [round(share, 4) for share in positions]}
        return found
