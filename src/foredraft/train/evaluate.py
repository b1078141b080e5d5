"""How good a drafter in training is: its loss on held-out text, and its replayed acceptance after held-out prompts."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foredraft import LLM
from foredraft.drafters.fit import Fit
from foredraft.drafters.training import Losses, Trace
from foredraft.train.documents import Document
from foredraft.train.plan import Evaluation
from foredraft.train.replay import REGIMES, Figures, Recording, Replay
from foredraft.train.trace import Tracer
from foredraft.train.windows import Windows

ROWS = 16  # of held-out text that the loss is measured on
ROWS_AT_ONCE = 4


def prompts_of(documents: Sequence[Document], count: int, length: int) -> list[list[int]]:
    """Questions of chats; of plain text a stretch of `length` tokens from anywhere in it. Documents in turn."""
    found: list[list[int]] = []
    rng = np.random.default_rng(0)
    for i in range(count if documents else 0):
        document = documents[i % len(documents)] if count > len(documents) else documents[i * len(documents) // count]
        if document.learnt is not None:
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
    asked: Evaluation
    held: Sequence[Document]
    context: int
    tracer: Tracer
    _recordings: dict[str, Recording] = field(default_factory=dict)

    def traces(self) -> list[Trace]:
        """Of a few rows of held-out text; none if there is none."""
        told = [document for document in self.held if document.mask.any()]  # others are prompts alone
        if not told:
            return []
        windows = Windows.pack(told, self.context)
        rows = sorted({i * len(windows) // ROWS for i in range(ROWS)})
        parts = [rows[i : i + ROWS_AT_ONCE] for i in range(0, len(rows), ROWS_AT_ONCE)]
        return [self.tracer.trace(*windows.read(part)) for part in parts]

    def loss(self, loss_of: Callable[[Trace], Losses]) -> dict[str, float]:
        """Of the drafter as it is, by token to learn."""
        total, learnt = 0.0, 0.0
        for trace in self.traces():
            weight = float(trace.mask.sum())
            total += weight * loss_of(trace).total.item()
            learnt += weight
        return {"loss": round(total / learnt, 5)} if learnt else {}

    def acceptance(self, publish: Callable[[Path], None]) -> dict[str, Any]:
        """Acceptance length and acceptance by position, by regime, of what `publish` writes into a folder."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            publish(folder)
            return self.replayed(folder)

    def replayed(self, folder: Path) -> dict[str, Any]:
        """The same of a drafter in a folder."""
        found: dict[str, Any] = {}
        if not self.asked.prompts or not self.held:
            return found
        for regime, temperature in REGIMES.items():
            if regime not in self._recordings:
                room = min(64, self.llm.target.context_length - self.asked.tokens - 1)
                prompts = prompts_of(self.held, self.asked.prompts, max(room, 1))
                self._recordings[regime] = Recording.make(self.llm, prompts, temperature, self.asked.tokens)
            spec = {"method": self.method, "model": str(folder)}
            drafting = self.llm.with_drafter(spec, self.asked.num_tokens, "auto")
            fit: Fit | None = getattr(drafting.drafter, "fit", None)
            if fit is not None:  # a drafter in training is for this target, however weak it still is
                fit.is_silent = True
            figures = Figures.of(Replay(drafting, self._recordings[regime]).run())
            length, positions = figures.acceptance_length, figures.per_position
            found[regime] = {"length": round(length, 4), "positions": [round(share, 4) for share in positions]}
        return found
