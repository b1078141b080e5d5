"""Drafts of several drafters as one tree (SpecInfer's boosted speculation, 2305.09781).

What was drawn stands first, as it was drawn, and is never dropped: its nodes keep their numbers and its q. Guesses
come after it, and share the nodes that are there already. `foredraft.verify` says why that order is lossless, and why a
guess that was drawn too needs no node of its own. Drafts of two drafters that both drew are not merged: a row of q
speaks for one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.base import Draft
from foredraft.request import Batch
from foredraft.tree import TokenTree


@dataclass
class Joint:
    """One request's tree while drafts are added to it. Node 0 is the root."""

    tokens: list[int]  # [N], the root's first
    parents: list[int]  # [N], -1 first
    q: Tensor | None = None  # [n, V] of the first n nodes, as they were drawn; None = guesses alone
    drawn: list[int] = field(default_factory=list)  # [n] children drawn below them
    _below: dict[tuple[int, int], int] | None = None  # (parent, token) -> node

    @classmethod
    def bare(cls, root: int) -> "Joint":
        return cls([root], [-1])

    @classmethod
    def of(cls, tree: TokenTree, b: int, first_row: int) -> "Joint":
        """A drafter's own tree; its rows of q begin at `first_row`."""
        tokens = tree.token_lists[b]
        joint = cls(list(tokens), list(tree.parent_lists[b]))
        if tree.q is not None:
            rows = slice(first_row, first_row + len(tokens))
            joint.q = tree.q[rows]
            joint.drawn = [len(c) for c in tree.children[b]] if tree.drawn is None else list(tree.drawn[rows])
        return joint

    @property
    def size(self) -> int:
        """Nodes below the root."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def tip(self) -> tuple[int, list[int]]:
        """The end of the path of eldest children, and the tokens on it."""
        node, path = 0, []
        for child in range(1, len(self.tokens)):  # the first child that is met is the eldest
            if self.parents[child] == node:
                node = child
                path.append(self.tokens[child])
        return node, path

    def graft(self, draft: Draft, most: int, at: int = 0) -> list[int]:
        """Guesses below the node `at`, until there are `most` nodes below the root.

        Returns the nodes that stand for the root and the nodes of the draft; -1 where there was no room.
        """
        below = self._index()
        places = [at]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            above = places[parent]
            node = below.get((above, token), -1) if above >= 0 else -1
            if node < 0 <= above and self.size < most:
                node = below[above, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
            places.append(node)
        return places

    def _index(self) -> dict[tuple[int, int], int]:
        if self._below is None:
            self._below = {}
            for node in range(1, len(self.tokens)):
                self._below.setdefault((self.parents[node], self.tokens[node]), node)
        return self._below


def planted(batch: Batch, joints: Sequence[Joint]) -> TokenTree:
    """B trees as one; [R, V] q with rows of zeros for guesses, if anything was drawn."""
    tokens, parents = [joint.tokens for joint in joints], [joint.parents for joint in joints]
    some = next((joint.q for joint in joints if joint.q is not None), None)
    if some is None:
        return TokenTree(tokens, parents)
    rows: list[Tensor] = []
    drawn: list[int] = []
    for joint, is_scored in zip(joints, batch.scored, strict=True):
        if is_scored:
            known = 0 if joint.q is None else len(joint.q)
            if joint.q is not None:
                rows.append(joint.q)
            if known < len(joint.tokens):
                rows.append(some.new_zeros(len(joint.tokens) - known, some.shape[-1]))
            drawn += [*joint.drawn, *[0] * (len(joint.tokens) - known)]
    q = rows[0] if len(rows) == 1 else torch.cat(rows)
    return TokenTree(tokens, parents, q, drawn=tuple(drawn))


def first_rows(batch: Batch, tree: TokenTree) -> list[int]:
    """B: where the rows of q of every request begin, as a drafter stacks them."""
    found, row = [], 0
    for size, is_scored in zip(tree.sizes, batch.scored, strict=True):
        found.append(row)
        row += size if is_scored else 0
    return found


def own_path(path: Sequence[int], offset: int, places: Sequence[int]) -> list[int]:
    """A surviving path in the numbers of one drafter's tree, whose node n stands at places[n] of the tree that was
    verified; both lie `offset` nodes into the request's chunk. What is not in its tree has numbers beyond it."""
    own = {place: node for node, place in enumerate(places) if place >= 0}
    found: list[int] = []
    for node in path:
        mine = own.get(node - offset) if node >= offset else None
        found.append(node if node < offset else offset + (len(places) + node if mine is None else mine))
    return found
