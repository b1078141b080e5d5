"""MLP speculator (2404.19124): a state vector goes from token to token through one small layer per step.

It begins as h_{n-2}, the target's state below the last committed token x_{n-1}; step i adds the embedding of the token
before it and guesses the next. States are a node's own, so a tree costs one row for every node looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.checkpoints.base import Checkpoint, SpeculatorShape
from foredraft.drafters.base import Context, Draft, plant
from foredraft.drafters.borrowed import loaded
from foredraft.drafters.growth import Growth, Plan, Scores, extend
from foredraft.drafters.mlp_network import Steps
from foredraft.drafters.mlp_training import TrainConfig, trainee
from foredraft.drafters.newest import NewestStates, Products, stacked
from foredraft.errors import ForedraftError
from foredraft.filters import likeliest
from foredraft.models.window import NORMED
from foredraft.request import Batch, Request
from foredraft.tree import Commit, TokenTree

__all__ = ["METHOD", "Config", "TrainConfig", "create", "trainee"]

METHOD = "mlp_speculator"


@dataclass(frozen=True)
class Config:
    """`tree_nodes` and `top_k`: a tree of the likeliest paths, every level looking at `top_k` nodes. `branching`: a
    tree of that shape, or "published" for the one in the checkpoint's config. Neither: a chain. `min_confidence`: a
    draft ends where no path of it is likelier than this."""

    tree_nodes: int | None = None
    top_k: int | None = None
    branching: tuple[int, ...] | str | None = None
    min_confidence: float = 0.0
    quantization: str | None = None

    def plan(self, num_tokens: int, shape: SpeculatorShape) -> Plan:
        """What to draft, no deeper than the speculator was trained for. Raises ForedraftError where that is nothing."""
        branching = self.branching
        if isinstance(branching, str):
            if branching != "published":
                raise ForedraftError(f'branching takes numbers of children by depth, or "published", got {branching!r}')
            if shape.branching is None:
                raise ForedraftError("the checkpoint says no top_k_tokens_per_head; give branching as numbers")
            branching = shape.branching
        if branching is not None and len(branching) > shape.n_predict:
            raise ForedraftError(
                f"branching is {len(branching)} deep, and the speculator was trained for {shape.n_predict} steps"
            )
        depth = min(num_tokens, shape.n_predict)
        return Plan.of(depth, self.tree_nodes, self.top_k, branching, self.min_confidence)


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

    def token(self, node: int) -> int:
        return self.growth.tokens[node - 1] if node else self.request.token(self.request.num_tokens - 1)


class Speculator:
    """All requests of a batch one level deeper with each pass of a step's layer."""

    taps: tuple[int, ...] = (NORMED,)

    def __init__(self, shape: SpeculatorShape, tensors: dict[str, Tensor], plan: Plan, context: Context,
                 quantization: str | None = None) -> None:  # fmt: skip
        self.shape = shape
        self.plan = plan
        self.context = context
        self._states = NewestStates()
        self.steps = Steps(shape, tensors, plan.depth, Products(context, quantization), context.vocab_size)

    @property
    def num_nodes(self) -> int:
        return self.plan.nodes

    def propose(self, batch: Batch) -> TokenTree:
        drafts = [Draft()] * len(batch)
        branches = [branch for b in batch.drafting() if (branch := self._branch(batch, b)) is not None]
        if branches:
            run = self._chains if all(map(_is_plain, branches)) else self._grow
            for branch, draft in zip(branches, run(branches), strict=True):
                drafts[branch.b] = draft
        return plant(batch, drafts)

    def observe(self, batch: Batch, commit: Commit) -> None:
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

    def _chains(self, branches: Sequence[Branch]) -> list[Draft]:
        """Greedy chains: nothing is asked of a level but its likeliest token."""
        states = self.steps.begin(stacked([branch.state for branch in branches]))
        tokens = [branch.token(0) for branch in branches]
        found: list[list[int]] = [[] for _ in branches]
        for step in range(max(branch.growth.plan.depth for branch in branches)):
            states, logits = self.steps(step, states, tokens)
            tokens = likeliest(logits if logits.dtype == torch.float64 else logits.float())
            for branch, drafted, token in zip(branches, found, tokens, strict=True):
                if len(drafted) == step < branch.growth.plan.depth and token >= 0:
                    drafted.append(token)
            tokens = [max(token, 0) for token in tokens]
        return [Draft.chain(drafted) for drafted in found]

    def _grow(self, branches: Sequence[Branch]) -> list[Draft]:
        states = self.steps.begin(stacked([branch.state for branch in branches]))
        for i, branch in enumerate(branches):
            branch.rows = {0: i}
        for step in range(self.plan.depth):
            growing = [branch for branch in branches if branch.growth.frontier]
            if not growing:
                break
            nodes = [(branch, node) for branch in growing for node in branch.growth.frontier]
            tokens = [branch.token(node) for branch, node in nodes]
            above = [branch.rows[branch.growth.parents[node - 1] if node else 0] for branch, node in nodes]
            states, logits = self.steps(step, _rows(states, above), tokens)
            first = 0
            for branch in growing:
                branch.rows = {node: first + i for i, node in enumerate(branch.growth.frontier)}
                first += len(branch.growth.frontier)
            extend([branch.growth for branch in growing], Scores(logits, self.context.vocab_size))
        return [branch.growth.draft() for branch in branches]


def _is_plain(branch: Branch) -> bool:
    plan, sampling = branch.growth.plan, branch.request.sampling
    return plan.width == 1 and not plan.min_confidence and sampling.is_greedy and not sampling.shapes_logits


def _rows(states: Tensor, rows: Sequence[int]) -> Tensor:
    return states if list(rows) == list(range(len(states))) else states[list(rows)]


def create(config: Config, context: Context) -> Speculator:
    """Load the speculator. Raises ForedraftError if it is not the target's."""
    return from_checkpoint(config, loaded(context, METHOD), context)


def from_checkpoint(config: Config, checkpoint: Checkpoint, context: Context) -> Speculator:
    """From one that is loaded."""
    shape = checkpoint.shape
    if not isinstance(shape, SpeculatorShape):
        raise ForedraftError(f"{checkpoint.folder} holds no MLP speculator but {checkpoint.format}")
    plan = config.plan(context.num_tokens, shape)
    return Speculator(shape, checkpoint.tensors, plan, context, config.quantization)
