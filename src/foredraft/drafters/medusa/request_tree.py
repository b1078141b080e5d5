"""One request to draft for with Medusa's heads, and its tree filled with tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.drafters.common.static_tree import StaticTree
from foredraft.drafters.draft import Draft, draft_noise_key
from foredraft.request import Request


@dataclass(frozen=True)
class MedusaRequest:
    """One request to draft for."""

    batch_index: int
    request: Request
    tree: StaticTree  # cut to the depth and budget of the request
    state: Tensor  # [H] target state before the last committed token
    draft_stream: int  # of the batch

    @property
    def shapes_logits(self) -> bool:
        """Whether logits depend on the tokens before them, as with penalties."""
        return self.request.spec.sampling.shapes_logits

    @property
    def uses_q(self) -> bool:
        """Whether draft tokens are sampled from a q that the verification rule uses."""
        spec = self.request.spec
        return spec.rule.uses_q and not spec.sampling.is_greedy

    @property
    def is_random(self) -> bool:
        """Whether draft tokens are sampled, from a q or with the target's noise."""
        spec = self.request.spec
        return (spec.rule.uses_q or spec.rule.shares_noise) and not spec.sampling.is_greedy

    def list_races(self) -> list[tuple[int, int]]:
        """List the races of a random request: node and depth. One per node if a rule reads q, else one per depth."""
        if self.uses_q:
            return [(node, self.tree.get_depth(node)) for node in self.tree.inner_nodes]
        return [(0, level) for level in range(self.tree.depth)]

    def derive_key(self, node: int, depth: int) -> int:
        """Return the noise key of a race."""
        return draft_noise_key(self.request, node, depth, self.draft_stream)

    def fill_likeliest(self, ids: Sequence[Sequence[int]]) -> Draft:
        """Make the draft of the likeliest tokens, by depth and rank."""
        return fill_tree(self.tree, ids, [depth - 1 for depth in self.tree.depths])

    def fill_sampled(self, ids: Sequence[Sequence[int]], q: Tensor) -> Draft:
        """Make the draft of sampled tokens.

        Args:
            ids: tokens of each race of `list_races`, in order.
            q: distributions [D, V] by depth.
        """
        if self.uses_q:
            return fill_tree(self.tree, ids, self.tree.parent_inner_index, q)
        return self.fill_likeliest(ids)


def fill_tree(
    tree: StaticTree, ids: Sequence[Sequence[int]], row_of_node: Sequence[int], probs: Tensor | None = None
) -> Draft:
    """Make a draft of a tree: node n gets ids[row_of_node[n - 1]][rank].

    Args:
        tree: shape.
        ids: tokens by row and rank; a node with -1 or no token is dropped, with all below it.
        row_of_node: row of `ids` of each node from 1 on.
        probs: q [D, V] by depth if the tokens were sampled.
    """
    tokens: list[int] = []
    parents: list[int] = []
    index = {0: 0}
    for node, (parent, rank, row) in enumerate(zip(tree.parents, tree.ranks, row_of_node, strict=True), 1):
        if parent in index and rank < len(ids[row]) and ids[row][rank] >= 0:
            tokens.append(ids[row][rank])
            parents.append(index[parent])
            index[node] = len(tokens)
    if probs is None:
        return Draft(tuple(tokens), tuple(parents))
    q = torch.cat([probs, probs.new_zeros(1, probs.shape[-1])])  # zeros below the deepest level
    depths = [0, *(tree.depths[node - 1] for node in index if node)]
    return Draft(tuple(tokens), tuple(parents), q[depths])
