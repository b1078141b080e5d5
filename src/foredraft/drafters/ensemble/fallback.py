"""Combination of two drafters: a primary one, and a fallback for the requests that the primary has no draft for."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.drafters.interface import Drafter
from foredraft.drafters.no_drafter import NoDrafter
from foredraft.drafters.spec import DrafterSpec, combine_token_steps
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.errors import ForedraftError
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


class FallbackDrafter(DrafterWrapper):
    """Drafter that proposes with `primary`, and with the wrapped fallback for requests without a primary draft.

    The fallback sees a budget of 0 for requests that the primary serves, so it keeps no state of a draft for them.
    Both drafters observe every commit and forget every slot. The primary reads tokens alone.

    Args:
        primary: drafter whose drafts come first.
        fallback: drafter of the other requests. None = none.
        concerns: whether the primary may have something to observe in a batch; it is not called otherwise.

    Raises:
        ForedraftError: if the primary reads hidden states of the target.
    """

    def __init__(
        self, primary: Drafter, fallback: Drafter | None = None, concerns: Callable[[Batch], bool] = lambda batch: True
    ) -> None:
        super().__init__(NoDrafter() if fallback is None else fallback)
        self.primary = primary
        self.concerns = concerns
        self._specs = primary.spec, self.drafter.spec
        self._spec = _combine_specs(*self._specs)
        if self._specs[0].hidden_layers:
            raise ForedraftError(
                f"{type(primary).__name__} reads the target's hidden states, so it cannot have a fallback"
            )

    @property
    def spec(self) -> DrafterSpec:
        """Spec of the fallback, with the nodes and the argmax that either of the two needs."""
        specs = self.primary.spec, self.drafter.spec
        if specs[0] is not self._specs[0] or specs[1] is not self._specs[1]:
            self._specs, self._spec = specs, _combine_specs(*specs)
        return self._spec

    def propose(self, batch: Batch) -> TokenTree:
        max_primary_nodes = self.primary.spec.max_nodes
        if not max_primary_nodes:
            return self.drafter.propose(batch)
        tree = self.primary.propose(_limit_budgets(batch, max_primary_nodes))
        is_served = [size > 1 for size in tree.sizes]
        remaining = _limit_budgets(batch, self.drafter.spec.max_nodes, is_served)
        if not remaining.find_drafting():
            return tree
        fallback_tree = self.drafter.propose(remaining)
        return _select_trees(batch, tree, fallback_tree, is_served) if any(is_served) else fallback_tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        if self.concerns(batch):
            self.primary.observe(batch, commit)
        self.drafter.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        self.primary.forget(slots)
        self.drafter.forget(slots)


def _combine_specs(primary: DrafterSpec, fallback: DrafterSpec) -> DrafterSpec:
    return replace(
        fallback,
        max_nodes=max(primary.max_nodes, fallback.max_nodes),
        needs_target_argmax=primary.needs_target_argmax or fallback.needs_target_argmax,
        num_target_candidates=max(primary.num_target_candidates, fallback.num_target_candidates),
        reads_commits=primary.reads_commits or fallback.reads_commits,
        reads_plain_commits=primary.reads_plain_commits or fallback.reads_plain_commits,
        token_steps=combine_token_steps([primary, fallback]),
        is_token_source=False,
        member_backoffs=(*primary.member_backoffs, *fallback.member_backoffs),
    )


def _limit_budgets(batch: Batch, max_nodes: int, is_served: Sequence[bool] | None = None) -> Batch:
    """Limit all budgets to `max_nodes`, and to 0 for served requests."""
    budgets = tuple(min(budget, max_nodes) for budget in batch.granted_nodes)
    if is_served is not None:
        budgets = tuple(0 if is_primary else budget for is_primary, budget in zip(is_served, budgets, strict=True))
    return batch if budgets == batch.granted_nodes else replace(batch, granted_nodes=budgets)


def _select_trees(
    batch: Batch, primary_tree: TokenTree, fallback_tree: TokenTree, is_served: Sequence[bool]
) -> TokenTree:
    """Combine two trees: the primary's for served requests, else the fallback's."""
    trees = [primary_tree if is_primary else fallback_tree for is_primary in is_served]
    tokens = [list(tree.tokens[b]) for b, tree in enumerate(trees)]
    parents = [list(tree.parents[b]) for b, tree in enumerate(trees)]
    q, num_sampled_children = _stack_q(batch, primary_tree, fallback_tree, trees)
    further_samples = {
        place: samples
        for tree in (primary_tree, fallback_tree)
        if tree.further_samples is not None
        for place, samples in tree.further_samples.items()
        if tree is trees[place[0]]
    }
    return TokenTree(
        tokens,
        parents,
        q,
        num_sampled_children=num_sampled_children,
        predicted=primary_tree.predicted,
        further_samples=further_samples or None,
    )


def _stack_q(
    batch: Batch, primary_tree: TokenTree, fallback_tree: TokenTree, trees: Sequence[TokenTree]
) -> tuple[Tensor | None, tuple[int, ...] | None]:
    """Combine q of two trees.

    Returns:
        q [R, V] with zeros for deterministic nodes; and the number of sampled children by row, None = all children.
    """
    any_q = primary_tree.q if primary_tree.q is not None else fallback_tree.q
    if any_q is None:
        return None, None
    rows: list[Tensor] = []
    num_sampled_children: list[int] = []
    offsets = {id(primary_tree): 0, id(fallback_tree): 0}
    for b, is_scored in enumerate(batch.needs_logits):
        if not is_scored:
            continue
        for tree in (primary_tree, fallback_tree):
            start, size = offsets[id(tree)], tree.sizes[b]
            offsets[id(tree)] += size
            if tree is trees[b]:
                rows.append(any_q.new_zeros(size, any_q.shape[-1]) if tree.q is None else tree.q[start : start + size])
                num_sampled_children += (
                    [len(c) for c in tree.children[b]]
                    if tree.num_sampled_children is None
                    else tree.num_sampled_children[start : start + size]
                )
    return torch.cat(
        rows
    ), None if primary_tree.num_sampled_children is None and fallback_tree.num_sampled_children is None else tuple(
        num_sampled_children
    )
