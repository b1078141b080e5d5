"""Draft of one request while it grows, with the KV position of every node that the draft model has computed.

The positions follow those of the committed tokens. A node that falls out of a dynamic tree's best nodes is never
verified, nor is any descendant. Its position is reused, so a draft needs no more positions than the verified tree has
nodes.
"""

from dataclasses import dataclass, field
from itertools import count, islice

from torch import Tensor

from foredraft.drafters.common.level_loop import GrowingDraft
from foredraft.drafters.draft import Draft
from foredraft.models.forward_batch import Span


@dataclass
class GrowingKVDraft(GrowingDraft):
    """Growing draft with KV entries. The entry of the root, at offset 0, is computed before the draft."""

    start: int = field(kw_only=True)  # KV position of the root's entry
    offsets: dict[int, int] = field(default_factory=lambda: {0: 0})  # node -> KV position, relative to `start`

    def finish_chain(self, tokens: list[int], q: Tensor | None, has_last_entry: bool) -> None:
        """Store a chain that was drafted in one call.

        Args:
            tokens: n tokens.
            q: q [1 + n, V], if the tokens were sampled from it.
            has_last_entry: whether the last token has a KV entry; all others have one.
        """
        n, builder = len(tokens), self.builder
        builder.tokens, builder.parents, builder.depths = tokens, list(range(n)), list(range(n + 1))
        builder.frontier = []
        self.offsets = {node: node for node in range(n + has_last_entry or 1)}
        self.finished = Draft.from_chain(tokens, q)

    def build_span(self) -> Span:
        """Build the frontier's span of a forward pass; each node attends to its ancestors."""
        builder = self.builder
        nodes = self.assign_offsets()
        size = 1 + max(self.offsets.values())
        depths, parents = [0] * size, [-1] * size
        for node, offset in self.offsets.items():
            depths[offset] = builder.depths[node]
            if node:
                parents[offset] = self.offsets[builder.parents[node - 1]]
        is_chain = parents == list(range(-1, size - 1))
        is_last = nodes == list(range(size - len(nodes), size))
        tokens, first_node = [builder.tokens[node - 1] for node in builder.frontier], size - len(nodes)
        tree, subset = None if is_chain else parents, None if is_last else nodes
        request = builder.request
        return Span(request.pages, self.start, tokens, depths, tree, first_node, request.spec.source, subset)

    def assign_offsets(self) -> list[int]:
        """Give every frontier node a free KV position, after freeing those of nodes that left the best nodes."""
        builder = self.builder
        if builder.prunes_nodes:
            alive = {0, *builder.best_nodes}
            self.offsets = {node: offset for node, offset in self.offsets.items() if node in alive}
        used = set(self.offsets.values())
        free = islice((offset for offset in count() if offset not in used), len(builder.frontier))
        self.offsets |= dict(zip(builder.frontier, list(free), strict=True))
        return [self.offsets[node] for node in builder.frontier]
