"""Combination of two drafters: a primary one, and a fallback for the requests that the primary has no draft for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.failure_backoff import FailureBackoff
from foredraft.drafters.interface import Drafter
from foredraft.errors import ForedraftError
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


class FallbackDrafter:
    """Drafter that proposes with `primary`, and with `fallback` for requests without a primary draft.

    The fallback sees a budget of 0 for requests that the primary serves, so it keeps no state of a draft for them.
    Both drafters observe every commit and forget every slot. The primary reads tokens alone.

    Raises:
        ForedraftError: if the primary reads hidden states of the target.
    """

    def __init__(self, primary: Drafter, fallback: Drafter | None = None) -> None:
        if primary.hidden_layers:
            raise ForedraftError(
                f"{type(primary).__name__} reads the target's hidden states, so it cannot have a fallback"
            )
        self.primary = primary
        self.fallback = fallback

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        return (self.primary,) if self.fallback is None else (self.primary, self.fallback)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return () if self.fallback is None else self.fallback.hidden_layers

    @property
    def needs_target_argmax(self) -> bool:
        return any(getattr(drafter, "needs_target_argmax", False) for drafter in self.drafters)

    @property
    def max_nodes(self) -> int:
        return max(drafter.max_nodes for drafter in self.drafters)

    @property
    def draft_kv(self) -> Any:
        """KV cache of the fallback on the target's pages, if it has one."""
        return getattr(self.fallback, "draft_kv", None)

    @property
    def backoffs(self) -> tuple[FailureBackoff, ...]:
        """Backoffs of both drafters, if each has a sandbox of its own."""
        return tuple(one for drafter in self.drafters for one in getattr(drafter, "backoffs", ()))

    def propose(self, batch: Batch) -> TokenTree:
        if self.fallback is not None and not self.primary.max_nodes:
            return self.fallback.propose(batch)
        tree = self.primary.propose(_limit_budgets(batch, self.primary.max_nodes))
        is_served = [size > 1 for size in tree.sizes]
        if self.fallback is None:
            return tree
        remaining = _limit_budgets(batch, self.fallback.max_nodes, is_served)
        if not remaining.find_drafting():
            return tree
        fallback_tree = self.fallback.propose(remaining)
        return _select_trees(batch, tree, fallback_tree, is_served) if any(is_served) else fallback_tree

    def observe(self, batch: Batch, commit: Commit) -> None:
        for drafter in self.drafters:
            drafter.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.forget(slots)


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
    return TokenTree(tokens, parents, q, num_sampled_children=num_sampled_children, predicted=primary_tree.predicted)


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
