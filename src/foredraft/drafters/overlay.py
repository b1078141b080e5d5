"""Two drafters as one: the first serves the requests it has something for, the second all others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.base import Drafter
from foredraft.drafters.probation import Probation
from foredraft.errors import ForedraftError
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree


class Overlay:
    """`first` proposes; `main`, if there is one, does for the requests it proposed nothing for.

    Where `first` served a request, `main` sees a budget of zero for it: that is a step in which it was not asked.
    Both observe everything and forget everything. What is kept per draft is kept per slot, and `main` has kept nothing
    of a slot it was not asked about, so no draft is mistaken for its own. `first` sees tokens alone. Raises
    ForedraftError for one that wants to see the target's states.
    """

    def __init__(self, first: Drafter, main: Drafter | None = None) -> None:
        if first.taps:
            raise ForedraftError(f"{type(first).__name__} reads the target's states, so it cannot be laid over another")
        self.first = first
        self.main = main

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return (self.first,) if self.main is None else (self.first, self.main)

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.main is None else self.main.taps

    @property
    def wants_answers(self) -> bool:
        return any(getattr(part, "wants_answers", False) for part in self.parts)

    @property
    def num_nodes(self) -> int:
        return max(part.num_nodes for part in self.parts)

    @property
    def memory(self) -> Any:
        """What `main` keeps on the target's pages, if it says so."""
        return getattr(self.main, "memory", None)

    @property
    def probations(self) -> tuple[Probation, ...]:
        """Of both, where they fail alone (each in a Guard of its own)."""
        return tuple(one for part in self.parts for one in getattr(part, "probations", ()))

    def propose(self, batch: Batch) -> TokenTree:
        if self.main is not None and not self.first.num_nodes:
            return self.main.propose(batch)
        tree = self.first.propose(_bounded(batch, self.first.num_nodes))
        served = [size > 1 for size in tree.sizes]
        if self.main is None:
            return tree
        left = _bounded(batch, self.main.num_nodes, served)
        if not left.drafting():
            return tree
        other = self.main.propose(left)
        return _chosen(batch, tree, other, served) if any(served) else other

    def observe(self, batch: Batch, commit: Commit) -> None:
        for part in self.parts:
            part.observe(batch, commit)

    def forget(self, slots: Sequence[int]) -> None:
        for part in self.parts:
            part.forget(slots)


def _bounded(batch: Batch, most: int, served: Sequence[bool] | None = None) -> Batch:
    """With budgets of at most `most` nodes, and none where a request is served."""
    budgets = tuple(min(budget, most) for budget in batch.budgets)
    if served is not None:
        budgets = tuple(0 if done else budget for done, budget in zip(served, budgets, strict=True))
    return batch if budgets == batch.budgets else replace(batch, budgets=budgets)


def _chosen(batch: Batch, first: TokenTree, main: TokenTree, served: Sequence[bool]) -> TokenTree:
    """The rows of `first` where it serves, else those of `main`."""
    trees = [first if done else main for done in served]
    tokens = [list(tree.token_lists[b]) for b, tree in enumerate(trees)]
    parents = [list(tree.parent_lists[b]) for b, tree in enumerate(trees)]
    q, drawn = _stacked(batch, first, main, trees)
    return TokenTree(tokens, parents, q, drawn=drawn, predicted=first.predicted)


def _stacked(
    batch: Batch, first: TokenTree, main: TokenTree, trees: Sequence[TokenTree]
) -> tuple[Tensor | None, tuple[int, ...] | None]:
    """[R, V] q by scored row, zeros for guesses; and R counts of the children drawn from it, None = all of them."""
    some = first.q if first.q is not None else main.q
    if some is None:
        return None, None
    rows: list[Tensor] = []
    drawn: list[int] = []
    at = {id(first): 0, id(main): 0}
    for b, is_scored in enumerate(batch.scored):
        if not is_scored:
            continue
        for tree in (first, main):
            start, size = at[id(tree)], tree.sizes[b]
            at[id(tree)] += size
            if tree is trees[b]:
                rows.append(some.new_zeros(size, some.shape[-1]) if tree.q is None else tree.q[start : start + size])
                drawn += [len(c) for c in tree.children[b]] if tree.drawn is None else tree.drawn[start : start + size]
    return torch.cat(rows), None if first.drawn is None and main.drawn is None else tuple(drawn)
