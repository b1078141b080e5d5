"""Drafter for small recurrent networks on the target's last state: MLP speculator, Hydra, blockwise heads.

The first step reads h_{n-2}, the target's state before the last committed token x_{n-1}. Each further step takes all
drafts one level deeper. A step's state belongs to one node, so a tree costs one row per expanded node and no KV cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.last_hidden_state import LastHiddenStates, stack_states
from foredraft.drafters.mismatch_warning import MismatchDetector
from foredraft.drafters.registry import DrafterContext
from foredraft.drafters.tree_builder import NodeLogits, TreeBuilder, TreeSpec, add_level
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.request import Batch, Request
from foredraft.sampling.filters import argmax_tokens
from foredraft.tree import Commit, TokenTree


class StepRunner(Protocol):
    """Network in the form that drafts: R nodes per step."""

    def begin(self, hidden: Tensor) -> Tensor:
        """Convert target states [R, H] to the states that the first step reads, R rows."""

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read one more token per row. Returns the R new states, and logits [R, W] of the next tokens."""


@dataclass
class StepBranch:
    """Growing draft of one request, with the rows of its nodes in the last step's states."""

    batch_index: int
    builder: TreeBuilder
    state: Tensor  # [H] of the root
    rows: dict[int, int] = field(default_factory=dict)  # node -> row in the states of the last step

    @property
    def request(self) -> Request:
        return self.builder.request

    @property
    def is_greedy_chain(self) -> bool:
        """Whether the draft is a chain of likeliest tokens, for which `_draft_chains` is enough."""
        spec, sampling = self.builder.tree_spec, self.request.sampling
        return spec.width == 1 and not spec.min_confidence and sampling.is_greedy and not sampling.shapes_logits

    def get_token(self, node: int) -> int:
        """Return the token of a node; node 0 is the last committed token."""
        return self.builder.tokens[node - 1] if node else self.request.get_token(self.request.num_tokens - 1)


class StepDrafter:
    """Drafter around a StepRunner. Each step takes the drafts of all requests one level deeper.

    Args:
        runner: network.
        tree_spec: limits and shape of the draft.
        context: target, device and vocabulary.
        hidden_layer: boundary of the target whose state the first step reads.
    """

    def __init__(
        self, runner: StepRunner, tree_spec: TreeSpec, context: DrafterContext, hidden_layer: int = AFTER_FINAL_NORM
    ) -> None:
        self.runner = runner
        self.tree_spec = tree_spec
        self.context = context
        self.hidden_layers: tuple[int, ...] = (hidden_layer,)
        self._states = LastHiddenStates()
        self.mismatch_detector = MismatchDetector(context)

    @property
    def max_nodes(self) -> int:
        return self.tree_spec.max_nodes

    def propose(self, batch: Batch) -> TokenTree:
        branches = [branch for b in batch.find_drafting() if (branch := self._start_branch(batch, b)) is not None]
        drafts = draft_branches(self.runner, branches, self.context.vocab_size)
        return self.mismatch_detector.record_proposal(
            batch, to_token_tree(batch, dict(zip([branch.batch_index for branch in branches], drafts, strict=True)))
        )

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.mismatch_detector.record_commit(batch, commit)
        self._states.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self._states.forget(slots)

    def _start_branch(self, batch: Batch, b: int) -> StepBranch | None:
        request = batch.requests[b]
        state = self._states.get(request)
        if state is None:
            return None
        spec = self.tree_spec.restrict(request.max_draft_depth, batch.max_draft_nodes[b], not request.rule.takes_trees)
        return StepBranch(b, TreeBuilder(request, spec), state) if spec.max_depth > 0 and spec.max_nodes > 0 else None


def draft_branches(runner: StepRunner, branches: Sequence[StepBranch], vocab_size: int) -> list[Draft]:
    """Draft for every branch. Tokens beyond the width W of the logits are never drafted."""
    if not branches:
        return []
    if all(branch.is_greedy_chain for branch in branches):
        return _draft_chains(runner, branches)
    build_trees(runner, branches, vocab_size)
    return [branch.builder.to_draft() for branch in branches]


def _draft_chains(runner: StepRunner, branches: Sequence[StepBranch]) -> list[Draft]:
    """Draft chains of likeliest tokens, without a TreeBuilder per level."""
    states = runner.begin(stack_states([branch.state for branch in branches]))
    tokens = [branch.get_token(0) for branch in branches]
    chains: list[list[int]] = [[] for _ in branches]
    for step in range(max(branch.builder.tree_spec.max_depth for branch in branches)):
        states, logits = runner(step, states, tokens)
        tokens = argmax_tokens(logits if logits.dtype == torch.float64 else logits.float())
        for branch, chain, token in zip(branches, chains, tokens, strict=True):
            if len(chain) == step < branch.builder.tree_spec.max_depth and token >= 0:
                chain.append(token)
        tokens = [max(token, 0) for token in tokens]
    return [Draft.from_chain(tokens) for tokens in chains]


def build_trees(runner: StepRunner, branches: Sequence[StepBranch], vocab_size: int) -> None:
    """Grow the tree of every branch, level by level, until no branch has a frontier."""
    states = runner.begin(stack_states([branch.state for branch in branches]))
    for i, branch in enumerate(branches):
        branch.rows = {0: i}
    for step in range(max(branch.builder.tree_spec.max_depth for branch in branches)):
        growing = [branch for branch in branches if branch.builder.frontier]
        if not growing:
            break
        nodes = [(branch, node) for branch in growing for node in branch.builder.frontier]
        tokens = [branch.get_token(node) for branch, node in nodes]
        parent_rows = [branch.rows[branch.builder.parents[node - 1] if node else 0] for branch, node in nodes]
        states, logits = runner(step, _select_rows(states, parent_rows), tokens)
        first = 0
        for branch in growing:
            branch.rows = {node: first + i for i, node in enumerate(branch.builder.frontier)}
            first += len(branch.builder.frontier)
        add_level([branch.builder for branch in growing], NodeLogits(logits, vocab_size))


def _select_rows(states: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows of `states`, without a copy if they are all rows in order."""
    return states if list(rows) == list(range(len(states))) else states[list(rows)]
