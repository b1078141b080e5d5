"""String-level exact match (SLEM, 2502.05202 algorithm 2): a draft model of another vocabulary writes text, which is
cut into the target's tokens.

The tokens are guesses: whatever they are, the text keeps its law. A guess is right with the probability that the target
gives it, so the draft's likeliest token is the best one to go on with, at any temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from foredraft.drafters.base import Draft
from foredraft.drafters.growth import Plan
from foredraft.drafters.intersection import Pair
from foredraft.drafters.translated import Held, Translated
from foredraft.drafters.vocabularies import whole
from foredraft.filters import likeliest
from foredraft.models.window import Span
from foredraft.request import Batch
from foredraft.tree import Commit

AHEAD = 1  # draft tokens beyond the depth: what they complete makes the guesses before them certain


@dataclass(eq=False)
class Line:
    """One request's text while it is drafted."""

    held: Held
    pair: Pair
    tokens: list[int] = field(default_factory=list)  # of the draft
    text: bytes = b""
    guesses: list[int] = field(default_factory=list)  # tokens of the target
    is_over: bool = False
    chance: float = 1.0  # of the drafted path, by the draft

    def push(self, token: int) -> None:
        """The draft goes on with one of its tokens. A control token ends the text, and is a guess if the target has
        the same."""
        spelt = self.pair.draft.spelt
        piece = spelt[token] if token < len(spelt) else None
        if piece is None:
            self.guesses = self._cut() + ([self.pair.back[token]] if token in self.pair.back else [])
            self.is_over = True
            return
        self.tokens.append(token)
        self.text += piece
        # the last may merge with what comes next
        self.guesses = self._cut()[:-1]
        depth = self.held.plan.depth
        self.is_over = len(self.guesses) >= depth or len(self.tokens) >= depth + AHEAD

    def span(self) -> Span:
        """The newest token, on top of those before it."""
        start = self.held.length + len(self.tokens) - 1
        return Span(self.held.pages, start, self.tokens[-1:], range(1))

    def _cut(self) -> list[int]:
        """The drafted text in the target's tokens, as far as it can be spelt."""
        tail = self.held.reading.tail
        data = self.text[: max(len(whole(tail + self.text)) - len(tail), 0)]
        ids = self.pair.target.continued(tail, data) if data else []
        return ids[: next((i for i, token in enumerate(ids) if token < 0), len(ids))]


class Retokenising(Translated):
    """Chains of guesses."""

    vocab = "slem"

    def num_own(self, plan: Plan) -> int:
        return plan.depth + AHEAD

    def draft(self, held: Sequence[Held]) -> list[Draft]:
        lines = [Line(h, self.pair) for h in held]
        logits, growing = self.read_in(held), lines
        while True:
            bar = self.plan.min_confidence
            logits = logits if logits.dtype == torch.float64 else logits.float()
            chances = logits.softmax(-1).amax(-1).tolist() if bar else [1.0] * len(growing)
            for line, token, chance in zip(growing, likeliest(logits), chances, strict=True):
                line.chance *= chance
                if token < 0 or line.chance < bar:
                    line.is_over = True
                else:
                    line.push(token)
            growing = [line for line in growing if not line.is_over and self._has_room(line)]
            if not growing:
                break
            logits = self.forward([line.span() for line in growing], last_only=True)
        for line in lines:  # all but the newest token were looked at
            own = line.tokens[:-1]
            line.held.reading.expect(own, line.held.length + len(own))
        return [Draft.chain(line.guesses[: line.held.plan.depth]) for line in lines]

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Nothing: what stays of a draft is seen when the text is read."""

    def _has_room(self, line: Line) -> bool:
        return line.held.length + len(line.tokens) <= self.lm.context_length
