"""Rows of one request in a forward pass."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.loaded_adapter import LoadedAdapter
from foredraft.placed_images import PlacedImages
from foredraft.source import EncoderSource


class Span(NamedTuple):
    """Rows of one request in a forward batch: nodes of its tree after `start` tokens with KV.

    The KV of node n is at offset start + n of the request's pages. An earlier pass may have computed some of the nodes.
    """

    pages: Sequence[int]  # page ids of the request, in order
    start: int  # tokens before node 0; their KV is written. Position of node 0
    tokens: Sequence[int]  # token ids of this pass, one per row
    depths: Sequence[int]  # depth by node index, from node 0 on, nodes of earlier passes included
    parents: Sequence[int] | None = None  # parent by node index, -1 for node 0; None = a chain
    first_node: int = 0  # node index of tokens[0], unless `node_subset` is set
    source: EncoderSource | None = None  # encoder input of the request, for an encoder-decoder model
    node_subset: Sequence[int] | None = None  # node index of each token; None = consecutive from `first_node` on
    # Leading nodes that later nodes of this pass follow in a chain, and that no rejection can make the last one.
    num_settled: int = 0
    adapter: LoadedAdapter | None = None  # LoRA adapter of the request, for a pass of its target
    images: PlacedImages | None = None  # images of the request, for a pass of its target

    @property
    def node_indices(self) -> Sequence[int]:
        """Node index of each token."""
        return (
            range(self.first_node, self.first_node + len(self.tokens)) if self.node_subset is None else self.node_subset
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes, those of earlier passes included."""
        return self.first_node + len(self.tokens) if self.node_subset is None else len(self.depths)

    @property
    def num_keys(self) -> int:
        """Number of keys: of the tokens before node 0, and of all nodes."""
        return self.start + self.num_nodes

    def find_path(self, node: int) -> list[int]:
        """Return the node indices from node 0 down to this node."""
        if self.parents is None:
            return list(range(node + 1))
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def build_ancestor_mask(self) -> Tensor:
        """Build a mask [n, num_nodes] of the nodes that each of the n rows sees: its ancestors and itself.

        A token of an image may also see later ones.
        """
        n, num_nodes = len(self.tokens), self.num_nodes
        if self.parents is None:
            mask = torch.ones(n, num_nodes, dtype=torch.bool).tril(num_nodes - n)
        else:
            mask = torch.zeros(n, num_nodes, dtype=torch.bool)
            for row, node in enumerate(self.node_indices):
                mask[row, self.find_path(node)] = True
        for row, node in enumerate(self.node_indices):
            if ahead := self.count_ahead(node):
                mask[row, node + 1 : node + 1 + ahead] = True
        return mask

    @property
    def has_local_blocks(self) -> bool:
        """Whether tokens of images see later ones in layers with a sliding window alone."""
        return self.images is not None and self.images.has_local_blocks

    def count_ahead(self, node: int) -> int:
        """Return how many of the nodes after its own, in a chain, a node sees."""
        if self.images is None or not self.images.blocks:
            return 0
        return min(self.images.count_ahead(self.start + node), self.num_nodes - 1 - node)
