"""Drafter for small recurrent networks on the target's last state: MLP speculator, Hydra, blockwise heads.

The first step reads h_{n-2}, the target's state before the last committed token x_{n-1}. Each further step takes all
drafts one level deeper. A step's state belongs to one node, so a tree costs one row per expanded node and no KV cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from foredraft.drafters.common.chain_loop import is_native_chain, plan_sampling
from foredraft.drafters.common.device_loop.loop import DraftLoop, make_draft_loop
from foredraft.drafters.common.device_loop.recording import LevelOutput
from foredraft.drafters.common.last_hidden_state import LastHiddenStates, can_run_native, stack_states
from foredraft.drafters.common.level_loop import GrowingDraft, LevelStates, grow_levels, start_builder
from foredraft.drafters.common.mismatch_warning import MismatchDetector
from foredraft.drafters.common.native_steps import NativeBlockRunner, NativeStepRunner
from foredraft.drafters.common.tree_builder import NodeLogits, TreeSpec
from foredraft.drafters.draft import Draft, to_token_tree
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.spec import DrafterSpec
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch
from foredraft.request import Batch, Request
from foredraft.sampling.filters import argmax_tokens
from foredraft.tree import Commit, TokenTree


class StepRunner(Protocol):
    """Network in the form that drafts: R nodes per step."""

    def begin(self, hidden: Tensor) -> Tensor:
        """Convert target states [R, H] to the states that the first step reads, R rows."""

    def __call__(self, step: int, states: Tensor, tokens: Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Read one more token per row. Returns the R new states, and logits [R, W] of the next tokens."""


@dataclass
class GrowingStepDraft(GrowingDraft):
    """Growing draft of one request, with the state that its first step reads."""

    batch_index: int = field(kw_only=True)
    state: Tensor = field(kw_only=True)  # [H] of the root

    @property
    def request(self) -> Request:
        return self.builder.request

    @property
    def is_greedy_chain(self) -> bool:
        """Whether the draft is a chain of likeliest tokens, for which `_draft_chains` is enough."""
        spec, sampling = self.builder.tree_spec, self.request.spec.sampling
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
        self.loop = make_draft_loop(StepLoopNetwork(runner, context.vocab_size), tree_spec, context.device)
        self._states = LastHiddenStates()
        self.mismatch_detector = MismatchDetector(context)
        self.spec = DrafterSpec(
            tree_spec.max_nodes,
            (hidden_layer,),
            missed_states="pause",  # a draft needs the newest state alone
            is_chain=tree_spec.is_chain,
            silence_mismatch=self.mismatch_detector.silence,
            is_native=can_run_native(context),
        )

    def propose(self, batch: Batch) -> TokenTree:
        growing = [draft for b in batch.find_drafting() if (draft := self._start_draft(batch, b)) is not None]
        drafts = grow_drafts(self.runner, growing, self.context.vocab_size, self.loop)
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
        builder = start_builder(self.tree_spec, batch, b, self.tree_spec.max_depth)
        return None if builder is None else GrowingStepDraft(builder, batch_index=b, state=state)


@dataclass(frozen=True)
class StepLoopNetwork:
    """StepRunner in a recorded loop. Roots are the target's states."""

    runner: StepRunner
    vocab_size: int

    def compute_root(self, roots: Sequence[Tensor], tokens: Tensor) -> LevelOutput:
        return self.compute_level(0, tokens, self.runner.begin(roots[0]), None)

    def compute_level(
        self, level: int, tokens: Tensor, states: Tensor | None, batch: ForwardBatch | None
    ) -> LevelOutput:
        assert states is not None
        states, logits = self.runner(level, states, tokens)
        return LevelOutput(NodeLogits(logits, self.vocab_size), states)


def grow_drafts(
    runner: StepRunner, drafts: Sequence[GrowingStepDraft], vocab_size: int, loop: DraftLoop | None = None
) -> list[Draft]:
    """Grow every draft to its end, in the recorded loop if it takes them.

    Tokens beyond the width W of the logits are never drafted.
    """
    if not drafts:
        return []
    if loop is not None and loop.grow(drafts, [stack_states([draft.state for draft in drafts])]):
        return [draft.builder.to_draft() for draft in drafts]
    if draft_native_chains(runner, drafts, vocab_size):
        return [draft.to_draft() for draft in drafts]
    if all(draft.is_greedy_chain for draft in drafts):
        return _draft_chains(runner, drafts)
    build_trees(runner, drafts, vocab_size)
    return [draft.builder.to_draft() for draft in drafts]


def draft_native_chains(runner: StepRunner, drafts: Sequence[GrowingStepDraft], vocab_size: int) -> bool:
    """Draft all chains in one native call. Returns False if it cannot; the drafts are as before then."""
    if not isinstance(runner, NativeStepRunner | NativeBlockRunner) or not runner.native.can_draft(vocab_size):
        return False
    if not all(is_native_chain(draft.builder) for draft in drafts):
        return False
    plans = [plan_sampling(draft.builder) for draft in drafts]
    states, roots = [draft.state for draft in drafts], [draft.get_token(0) for draft in drafts]
    found = runner.native.draft(plans, states, roots, vocab_size)
    if found is None:
        return False
    for b, (draft, plan) in enumerate(zip(drafts, plans, strict=True)):
        draft.finished = Draft.from_chain(found.tokens[b], found.get_q(b, plan))
    return True


def _draft_chains(runner: StepRunner, drafts: Sequence[GrowingStepDraft]) -> list[Draft]:
    """Draft chains of likeliest tokens, without a TreeBuilder per level."""
    states = runner.begin(stack_states([draft.state for draft in drafts]))
    tokens = [draft.get_token(0) for draft in drafts]
    chains: list[list[int]] = [[] for _ in drafts]
    for step in range(max(draft.builder.tree_spec.max_depth for draft in drafts)):
        states, logits = runner(step, states, tokens)
        tokens = argmax_tokens(logits if logits.dtype == torch.float64 else logits.float())
        for draft, chain, token in zip(drafts, chains, tokens, strict=True):
            is_growing = len(chain) == step < draft.builder.tree_spec.max_depth
            if is_growing and token >= 0 and not (chain and chain[-1] in draft.request.spec.end_ids):
                chain.append(token)
        tokens = [max(token, 0) for token in tokens]
    return [Draft.from_chain(tokens) for tokens in chains]


def build_trees(runner: StepRunner, drafts: Sequence[GrowingStepDraft], vocab_size: int) -> None:
    """Grow the tree of every draft, level by level, until no draft has a frontier."""
    states = LevelStates(runner.begin(stack_states([draft.state for draft in drafts])))
    states.start(drafts)
    compute = partial(_compute_step, runner, states, vocab_size)
    grow_levels(drafts, compute(drafts), compute)


def _compute_step(
    runner: StepRunner, states: LevelStates, vocab_size: int, drafts: Sequence[GrowingStepDraft]
) -> NodeLogits:
    """Run one step over the frontiers, which have the same depth in all drafts."""
    first = drafts[0].builder
    tokens = [draft.get_token(node) for draft in drafts for node in draft.builder.frontier]
    outputs, logits = runner(first.depths[first.frontier[0]], states.select_parents(drafts), tokens)
    states.record(drafts, outputs)
    return NodeLogits(logits, vocab_size)
