"""Drafting step by step from one state of the target: each step of a small network takes all drafts a level deeper.

The first step reads h_{n-2}, the target's state below the last committed token x_{n-1}. What a step keeps is a node's
own, so a tree costs one row for every node looked at, and no memory beyond the state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foredraft.drafters.base import Context, Draft, plant
from foredraft.drafters.fit import Fit
from foredraft.drafters.growth import Growth, Plan, Scores, extend
from foredraft.drafters.newest import NewestStates, stacked
from foredraft.filters import likeliest
from foredraft.models.window import NORMED
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree


class Steps(Protocol):
    """A network laid out for drafting."""

    def begin(self, hidden: Tensor) -> Tensor:
        """[R, H] states of the target -> what the first step reads, R rows."""

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """R rows after one more token each, and logits [R, W] of what follows."""


@dataclass
class Branch:
    """A draft that grows, and where the states of the level before its frontier are."""

    b: int
    growth: Growth
    state: Tensor  # [H] of the root
    rows: dict[int, int] = field(default_factory=dict)  # node -> row of the last level's states

    @property
    def request(self) -> Request:
        return self.growth.request

    @property
    def is_plain(self) -> bool:
        """A greedy chain: nothing is asked of a level but its likeliest token."""
        plan, sampling = self.growth.plan, self.request.sampling
        return plan.width == 1 and not plan.min_confidence and sampling.is_greedy and not sampling.shapes_logits

    def token(self, node: int) -> int:
        return self.growth.tokens[node - 1] if node else self.request.token(self.request.num_tokens - 1)


class SteppedDrafter:
    """All requests of a batch one level deeper with each step. `tap`: which state of the target the first one reads."""

    def __init__(self, steps: Steps, plan: Plan, context: Context, tap: int = NORMED) -> None:
        self.steps = steps
        self.plan = plan
        self.context = context
        self.taps: tuple[int, ...] = (tap,)
        self._states = NewestStates()
        self.fit = Fit(context)

    @property
    def num_nodes(self) -> int:
        return self.plan.nodes

    def propose(self, batch: Batch) -> TokenTree:
        branches = [branch for b in batch.drafting() if (branch := self._branch(batch, b)) is not None]
        drafts = drafted(self.steps, branches, self.context.vocab_size)
        return self.fit.proposed(batch, plant(batch, dict(zip([branch.b for branch in branches], drafts, strict=True))))

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.fit.observed(batch, commit)
        self._states.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self._states.forget(slots)

    def _branch(self, batch: Batch, b: int) -> Branch | None:
        request = batch.requests[b]
        state = self._states.of(request)
        if state is None:
            return None
        plan = self.plan.cut(request.room, batch.budgets[b], request.verify == "block")
        return Branch(b, Growth(request, plan), state) if plan.depth > 0 and plan.nodes > 0 else None


def drafted(steps: Steps, branches: Sequence[Branch], vocab_size: int) -> list[Draft]:
    """A draft for every branch; logits of fewer tokens than `vocab_size` leave the others undrafted."""
    if not branches:
        return []
    if all(branch.is_plain for branch in branches):
        return _chains(steps, branches)
    grown(steps, branches, vocab_size)
    return [branch.growth.draft() for branch in branches]


def _chains(steps: Steps, branches: Sequence[Branch]) -> list[Draft]:
    states = steps.begin(stacked([branch.state for branch in branches]))
    tokens = [branch.token(0) for branch in branches]
    found: list[list[int]] = [[] for _ in branches]
    for step in range(max(branch.growth.plan.depth for branch in branches)):
        states, logits = steps(step, states, tokens)
        tokens = likeliest(logits if logits.dtype == torch.float64 else logits.float())
        for branch, so_far, token in zip(branches, found, tokens, strict=True):
            if len(so_far) == step < branch.growth.plan.depth and token >= 0:
                so_far.append(token)
        tokens = [max(token, 0) for token in tokens]
    return [Draft.chain(tokens) for tokens in found]


def grown(steps: Steps, branches: Sequence[Branch], vocab_size: int) -> None:
    """Every branch's growth to its end, level by level."""
    states = steps.begin(stacked([branch.state for branch in branches]))
    for i, branch in enumerate(branches):
        branch.rows = {0: i}
    for step in range(max(branch.growth.plan.depth for branch in branches)):
        growing = [branch for branch in branches if branch.growth.frontier]
        if not growing:
            break
        nodes = [(branch, node) for branch in growing for node in branch.growth.frontier]
        tokens = [branch.token(node) for branch, node in nodes]
        above = [branch.rows[branch.growth.parents[node - 1] if node else 0] for branch, node in nodes]
        states, logits = steps(step, _rows(states, above), tokens)
        first = 0
        for branch in growing:
            branch.rows = {node: first + i for i, node in enumerate(branch.growth.frontier)}
            first += len(branch.growth.frontier)
        extend([branch.growth for branch in growing], Scores(logits, vocab_size))


def _rows(states: Tensor, rows: Sequence[int]) -> Tensor:
    return states if list(rows) == list(range(len(states))) else states[list(rows)]
