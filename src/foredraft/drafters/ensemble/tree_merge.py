"""Merging of several drafters' drafts into one tree.

The first drafter's nodes keep their indices and their q. Samples of further drafters follow, each with the q of its own
drafter, and then deterministic draft tokens. Equal tokens below one parent share a node. No sampled node is ever
dropped. docs/design.md ("Order of siblings") explains why this is lossless.

Reference: merge-based speculation of SpecInfer (2305.09781).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foredraft.drafters.draft import Draft
from foredraft.request import Batch
from foredraft.tree import SampledSiblings, TokenTree


@dataclass
class MergedTree:
    """One request's tree while drafts are added to it. Node 0 is the root."""

    tokens: list[int]  # [N], root first
    parents: list[int]  # [N], -1 first
    q: Tensor | None = None  # [n, V] of the first n nodes, which were sampled; None = deterministic nodes alone
    num_sampled_children: list[int] = field(default_factory=list)  # [n] sampled children by node
    further_samples: dict[int, list[SampledSiblings]] = field(default_factory=dict)  # of further drafters, by node
    _children: dict[tuple[int, int], int] | None = None  # (parent, token) -> node

    @classmethod
    def from_root(cls, root: int) -> "MergedTree":
        return cls([root], [-1])

    @classmethod
    def from_tree(cls, tree: TokenTree, b: int, q_offset: int) -> "MergedTree":
        """Start from a drafter's tree of request b; its rows of q begin at `q_offset`."""
        merged = cls(list(tree.tokens[b]), list(tree.parents[b]))
        if tree.q is not None:
            merged.q = tree.q[q_offset : q_offset + len(merged.tokens)]
            merged.num_sampled_children = _count_sampled_children(tree, b, q_offset)
        merged.further_samples = {node: list(found) for node, found in _find_further_samples(tree, b).items()}
        return merged

    @property
    def num_draft_nodes(self) -> int:
        """Number of nodes below the root."""
        return len(self.tokens) - 1

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def find_tip(self) -> tuple[int, list[int]]:
        """Return the end of the path of first children, and the tokens on that path."""
        node, path = 0, []
        for child in range(1, len(self.tokens)):  # nodes are in order, so the first match is the first child
            if self.parents[child] == node:
                node = child
                path.append(self.tokens[child])
        return node, path

    def graft(self, draft: Draft, max_nodes: int, anchor: int = 0) -> list[int]:
        """Add a deterministic draft below a node, until the tree has `max_nodes` nodes below the root.

        Returns:
            Node of this tree for the draft's root and for each of its nodes; -1 = it did not fit.
        """
        nodes_by_key = self._index_children()
        nodes = [anchor]
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            parent_node = nodes[parent]
            node = nodes_by_key.get((parent_node, token), -1) if parent_node >= 0 else -1
            if node < 0 <= parent_node and self.num_draft_nodes < max_nodes:
                node = nodes_by_key[parent_node, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent_node)
            nodes.append(node)
        return nodes

    def graft_samples(self, tree: TokenTree, b: int, q_offset: int) -> list[int]:
        """Add the tree of request b of one more drafter, which sampled it; its rows of q begin at `q_offset`.

        All its nodes are kept, so the drafters' budgets together must not exceed the room.

        Returns:
            Node of this tree for each node of the drafter's tree.
        """
        draft = Draft(tuple(tree.tokens[b][1:]), tuple(tree.parents[b][1:]))
        nodes = self.graft(draft, self.num_draft_nodes + len(draft.tokens))
        if tree.q is not None:
            q = tree.q[q_offset : q_offset + len(nodes)]
            counts = [
                count if has_q else 0
                for count, has_q in zip(_count_sampled_children(tree, b, q_offset), q.any(-1).tolist(), strict=True)
            ]
            for node, (count, children) in enumerate(zip(counts, tree.children[b], strict=True)):
                if children and count > 0:
                    samples = SampledSiblings(q[node], tuple(nodes[child] for child in children[:count]))
                    self.further_samples.setdefault(nodes[node], []).append(samples)
        for node, found in _find_further_samples(tree, b).items():
            self.further_samples.setdefault(nodes[node], []).extend(
                replace(samples, children=tuple(nodes[child] for child in samples.children)) for samples in found
            )
        return nodes

    def _index_children(self) -> dict[tuple[int, int], int]:
        if self._children is None:
            self._children = {}
            for node in range(1, len(self.tokens)):
                self._children.setdefault((self.parents[node], self.tokens[node]), node)
        return self._children


def _count_sampled_children(tree: TokenTree, b: int, q_offset: int) -> list[int]:
    """Return the number of sampled children of each node of request b; the tree has a q."""
    if tree.num_sampled_children is None:
        return list(map(len, tree.children[b]))
    return list(tree.num_sampled_children[q_offset : q_offset + tree.sizes[b]])


def _find_further_samples(tree: TokenTree, b: int) -> dict[int, tuple[SampledSiblings, ...]]:
    """Return the samples of request b in `TokenTree.further_samples`, by parent."""
    items = (tree.further_samples or {}).items()
    return {node: found for (owner, node), found in items if owner == b}


def stack_trees(batch: Batch, trees: Sequence[MergedTree]) -> TokenTree:
    """Combine B trees. If the first drafter sampled any node, q is [R, V], with zeros for all other nodes."""
    tokens, parents = [merged.tokens for merged in trees], [merged.parents for merged in trees]
    further = {(b, node): tuple(found) for b, one in enumerate(trees) for node, found in one.further_samples.items()}
    any_q = next((merged.q for merged in trees if merged.q is not None), None)
    if any_q is None:
        return TokenTree(tokens, parents, further_samples=further or None)
    rows: list[Tensor] = []
    num_sampled_children: list[int] = []
    for merged, is_scored in zip(trees, batch.needs_logits, strict=True):
        if is_scored:
            num_q_rows = 0 if merged.q is None else len(merged.q)
            if merged.q is not None:
                rows.append(merged.q)
            if num_q_rows < len(merged.tokens):
                rows.append(any_q.new_zeros(len(merged.tokens) - num_q_rows, any_q.shape[-1]))
            num_sampled_children += [*merged.num_sampled_children, *[0] * (len(merged.tokens) - num_q_rows)]
    q = rows[0] if len(rows) == 1 else torch.cat(rows)
    return TokenTree(
        tokens, parents, q, num_sampled_children=tuple(num_sampled_children), further_samples=further or None
    )


def compute_q_offsets(batch: Batch, tree: TokenTree) -> list[int]:
    """Return the first row of q of each of B requests; only requests with scored rows have rows."""
    found, row = [], 0
    for size, is_scored in zip(tree.sizes, batch.needs_logits, strict=True):
        found.append(row)
        row += size if is_scored else 0
    return found


def map_path_to_member(path: Sequence[int], offset: int, node_map: Sequence[int]) -> list[int]:
    """Convert an accepted path of the verified tree to node indices of one member's tree.

    Args:
        path: nodes of the verified tree.
        offset: nodes of the request's chunk before the root.
        node_map: node of the verified tree by node of the member; -1 = not in the verified tree.

    Returns:
        Nodes of the member. Nodes that are not in its tree get indices beyond its last node.
    """
    member_nodes = {verified_node: node for node, verified_node in enumerate(node_map) if verified_node >= 0}
    found: list[int] = []
    for node in path:
        member_node = member_nodes.get(node - offset) if node >= offset else None
        found.append(node if node < offset else offset + (len(node_map) + node if member_node is None else member_node))
    return found
