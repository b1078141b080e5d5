"""Drafter for small recurrent networks on the target's last state: MLP speculator, Hydra, blockwise heads.

The first step reads h_{n-2}, the target's state before the last committed token x_{n-1}. Each further step takes all
drafts one level deeper. A step's state belongs to one node, so a tree costs one row per expanded node and no KV cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foredraft.drafters.common.last_hidden_state import LastHiddenStates, stack_states
from foredraft.drafters.common.mismatch_warning import MismatchDetector
from foredraft.drafters.common.tree_builder import NodeLogits, TreeBuilder, TreeSpec, add_level
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.method import DrafterContext
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
class GrowingStepDraft:
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
        growing = [draft for b in batch.find_drafting() if (draft := self._start_draft(batch, b)) is not None]
        drafts = grow_drafts(self.runner, growing, self.context.vocab_size)
        tree = to_token_tree(batch, dict(zip([draft.batch_index for draft in growing], drafts, strict=True)))
        self.mismatch_detector.record_proposal(batch, tree)
        return tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        self.mismatch_detector.record_commit(batch, commit)
        self._states.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self._states.forget(slots)

    def _start_draft(self, batch: Batch, b: int) -> GrowingStepDraft | None:
        request = batch.requests[b]
        state = self._states.get(request)
        if state is None:
            return None
        spec = self.tree_spec.restrict(request.max_draft_depth, batch.granted_nodes[b], not request.rule.takes_trees)
        return (
            GrowingStepDraft(b, TreeBuilder(request, spec), state)
            if spec.max_depth > 0 and spec.max_nodes > 0
            else None
        )


def grow_drafts(runner: StepRunner, drafts: Sequence[GrowingStepDraft], vocab_size: int) -> list[Draft]:
    """Grow every draft to its end. Tokens beyond the width W of the logits are never drafted."""
    if not drafts:
        return []
    if all(draft.is_greedy_chain for draft in drafts):
        return _draft_chains(runner, drafts)
    build_trees(runner, drafts, vocab_size)
    return [draft.builder.to_draft() for draft in drafts]


def _draft_chains(runner: StepRunner, drafts: Sequence[GrowingStepDraft]) -> list[Draft]:
    """Draft chains of likeliest tokens, without a TreeBuilder per level."""
    states = runner.begin(stack_states([draft.state for draft in drafts]))
    tokens = [draft.get_token(0) for draft in drafts]
    chains: list[list[int]] = [[] for _ in drafts]
    for step in range(max(draft.builder.tree_spec.max_depth for draft in drafts)):
        states, logits = runner(step, states, tokens)
        tokens = argmax_tokens(logits if logits.dtype == torch.float64 else logits.float())
        for draft, chain, token in zip(drafts, chains, tokens, strict=True):
            if len(chain) == step < draft.builder.tree_spec.max_depth and token >= 0:
                chain.append(token)
        tokens = [max(token, 0) for token in tokens]
    return [Draft.from_chain(tokens) for tokens in chains]


def build_trees(runner: StepRunner, drafts: Sequence[GrowingStepDraft], vocab_size: int) -> None:
    """Grow the tree of every draft, level by level, until no draft has a frontier."""
    states = runner.begin(stack_states([draft.state for draft in drafts]))
    for i, draft in enumerate(drafts):
        draft.rows = {0: i}
    for step in range(max(draft.builder.tree_spec.max_depth for draft in drafts)):
        growing = [draft for draft in drafts if draft.builder.frontier]
        if not growing:
            break
        nodes = [(draft, node) for draft in growing for node in draft.builder.frontier]
        tokens = [draft.get_token(node) for draft, node in nodes]
        parent_rows = [draft.rows[draft.builder.parents[node - 1] if node else 0] for draft, node in nodes]
        states, logits = runner(step, _select_rows(states, parent_rows), tokens)
        first = 0
        for draft in growing:
            draft.rows = {node: first + i for i, node in enumerate(draft.builder.frontier)}
            first += len(draft.builder.frontier)
        add_level([draft.builder for draft in growing], NodeLogits(logits, vocab_size))


def _select_rows(states: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows of `states`, without a copy if they are all rows in order."""
    return states if list(rows) == list(range(len(states))) else states[list(rows)]
