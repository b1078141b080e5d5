"""Which layer to leave the target at: the one whose agreement with the target is worth most for what it costs.

Whatever is drafted, the states of the target's own passes tell what a draft from any of its layers would have been: a
node whose path was accepted has the same keys and values above it as the target's pass gave it. So all candidates are
looked at together, on the tokens the target emits, for a while, and again from time to time. Nothing here is timed, and
a choice rests on earlier steps alone: the text decides it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from foredraft.drafters.borrowed import packed_head
from foredraft.drafters.newest import packed_product
from foredraft.models.lm import HFModel
from foredraft.models.truncated import final_norm, weights_of
from foredraft.models.window import NORMED
from foredraft.request import Batch, Request
from foredraft.tree import Commit

FRACTIONS = (1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3)  # of the layers
FIRST = 1 / 4  # before anything is known
LOOK, EVERY = 64, 1024  # tokens looked at, and tokens emitted by drafting steps between two looks
ROWS = 16  # looked at in one step, at most
FADE = 0.5  # of what was seen before, at every new look


class Choice(Protocol):
    """Says where to leave the target now, and what of the target it wants to see."""

    @property
    def layer(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def see(self, batch: Batch, commit: Commit) -> None:
        """After every pass of the target."""


@dataclass(frozen=True)
class Given:
    """One layer for good."""

    layer: int
    taps: tuple[int, ...] = ()

    def see(self, batch: Batch, commit: Commit) -> None:
        """It is settled."""


@dataclass
class Agreement:
    """How often each candidate's law has the target's next token. Begins at one in two of two tokens."""

    hits: list[float]
    seen: float = 2.0

    @classmethod
    def unknown(cls, count: int) -> "Agreement":
        return cls([1.0] * count)

    def add(self, hits: Sequence[float], seen: int) -> None:
        self.hits = [old + new for old, new in zip(self.hits, hits, strict=True)]
        self.seen += seen

    def fade(self) -> None:
        self.hits = [FADE * old for old in self.hits]
        self.seen *= FADE

    @property
    def shares(self) -> list[float]:
        return [hit / self.seen for hit in self.hits]


@dataclass
class Measured:
    """`costs`: of one token drafted from each candidate, in passes of the target. `most`: tokens of the longest draft,
    nodes of the largest."""

    costs: Mapping[int, float]
    most: tuple[int, int]
    logits_of: Callable[[Tensor], Tensor]  # [R, C + 1, H] of the candidates and of NORMED -> [R, C + 1, V]
    layer: int
    agreement: Agreement = field(init=False)
    _left: int = LOOK  # tokens to look at still; 0 = not now
    _since: int = 0  # tokens emitted with drafts since the last look
    _is_fixed: bool = True  # every draft was granted its full size since then

    def __post_init__(self) -> None:
        self.agreement = Agreement.unknown(len(self.costs))

    @property
    def taps(self) -> tuple[int, ...]:
        return (*self.costs, NORMED) if self._left else ()

    def see(self, batch: Batch, commit: Commit) -> None:
        drafting = batch.drafting()
        self._is_fixed &= all(batch.budgets[b] >= min(self.most[1], batch.requests[b].room) for b in drafting)
        if not self._left:
            self._since += sum(commit.counts[b] for b in drafting)
            if self._since >= EVERY:
                self._left = LOOK
                self.agreement.fade()
        elif commit.features is not None:
            self._look(batch, commit, commit.features)

    def _look(self, batch: Batch, commit: Commit, features: Tensor) -> None:
        rows = _emitted(batch, commit)[: min(ROWS, self._left)]
        if not rows:
            return
        states = torch.stack([features[b, i] for b, i, _, _ in rows]).view(len(rows), len(self.costs) + 1, -1)
        hits = _agreed(self.logits_of(states), [request for _, _, request, _ in rows], [token for *_, token in rows])
        self.agreement.add(hits.sum(0).tolist(), len(rows))
        self._left -= len(rows)
        if not self._left:
            self._choose()

    def _choose(self) -> None:
        depth = self.most[0]
        worths = [
            worth(share, cost, depth, self._is_fixed)
            for share, cost in zip(self.agreement.shares, self.costs.values(), strict=True)
        ]
        self.layer = max(zip(worths, self.costs, strict=True), key=lambda found: (found[0], -found[1]))[1]
        self._since, self._is_fixed = 0, True


def worth(share: float, cost: float, most: int, is_fixed: bool = False) -> float:
    """Tokens per pass of the target of the best draft length up to `most`, or of that very length; 1 is plain decoding.

    A share of right tokens after right ones, which all tokens have alike, is what makes this short.
    """
    tokens, best = 1.0, 1.0
    for length in range(1, most + 1):
        tokens += share**length
        rate = tokens / (1.0 + length * cost)
        best = rate if is_fixed else max(best, rate)
    return best


def measured(target: HFModel, most: tuple[int, int]) -> Choice:
    """Among fractions of the target's layers; a layer for good where there is one alone, or none can be compared."""
    layers, norm = target.num_layers, final_norm(target.model)
    candidates = sorted({min(max(1, round(share * layers)), layers - 1) for share in FRACTIONS})
    first = min(max(1, round(FIRST * layers)), layers - 1)
    if len(candidates) == 1 or norm is None:
        return Given(first)
    costs = {layer: cost_of(target, layer) for layer in candidates}
    return Measured(costs, most, _reader(target, norm), first)


def cost_of(target: HFModel, layers: int) -> float:
    """Weights that a pass of the first layers reads, as a share of those of a whole pass."""
    layer, head = weights_of(target)
    return (layers * layer + head) / (target.num_layers * layer + head)


def _reader(target: HFModel, norm: nn.Module) -> Callable[[Tensor], Tensor]:
    head = packed_head(target)
    logits = target.head if head is None else packed_product(head)

    def read(states: Tensor) -> Tensor:
        normed = torch.cat([norm(states[:, :-1]), states[:, -1:]], 1)
        found: Tensor = logits(normed.flatten(0, 1))
        return found.view(*states.shape[:2], -1)

    return read


def _emitted(batch: Batch, commit: Commit) -> list[tuple[int, int, Request, int]]:
    """Row and place of every state whose next token the target has just said, with the request and the token."""
    return [
        (b, i, request, tokens[i])
        for b, (request, chunk, tokens) in enumerate(zip(batch.requests, batch.chunks, commit.token_lists, strict=True))
        if request.computed + chunk == request.num_tokens
        for i in range(chunk - 1, len(tokens))
    ]


def _agreed(logits: Tensor, requests: Sequence[Request], tokens: Sequence[int]) -> Tensor:
    """[R, C] the chance that the target takes what a candidate would draft: greedily, whether it is what it said, and
    otherwise one minus the distance of the two laws at the request's temperature. logits [R, C + 1, V], target last."""
    said = torch.tensor(tokens, device=logits.device)
    heat = torch.tensor([max(r.sampling.temperature, 1e-3) for r in requests], device=logits.device)
    laws = (logits.float() / heat[:, None, None]).softmax(-1)
    overlap = torch.minimum(laws[:, :-1], laws[:, -1:]).sum(-1)
    right = (logits[:, :-1].argmax(-1) == said[:, None]).to(overlap.dtype)
    is_greedy = torch.tensor([r.sampling.is_greedy for r in requests], device=logits.device)
    return torch.where(is_greedy[:, None], right, overlap)
