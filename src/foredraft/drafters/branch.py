"""A draft that grows over paged memory: every node that is looked at takes a place after what is committed.

A node that is no longer among the likeliest of a tree is never verified, and nothing below it is: its place serves
another node. So a draft needs no more places than the tree that is verified has nodes, however many are looked at.
"""

from dataclasses import dataclass, field
from itertools import count, islice

from foredraft.drafters.growth import Growth
from foredraft.models.window import Span


@dataclass
class Branch:
    """Places count from the one that stands for the root, which is written before anything is drafted."""

    growth: Growth
    start: int  # position in memory of what stands for the root
    places: dict[int, int] = field(default_factory=lambda: {0: 0})  # node -> place
    rows: dict[int, int] = field(default_factory=lambda: {0: 0})  # node -> row in the pass that looked at it last

    def span(self) -> Span:
        """The frontier as part of a window, seeing its ancestors among the nodes before it."""
        g = self.growth
        nodes = self._take_places()
        size = 1 + max(self.places.values())
        depths, parents = [0] * size, [-1] * size
        for node, place in self.places.items():
            depths[place] = g.depths[node]
            if node:
                parents[place] = self.places[g.parents[node - 1]]
        is_chain = parents == list(range(-1, size - 1))
        is_last = nodes == list(range(size - len(nodes), size))
        tokens, first = [g.tokens[node - 1] for node in g.frontier], size - len(nodes)
        shape, rows = None if is_chain else parents, None if is_last else nodes
        return Span(g.request.pages, self.start, tokens, depths, shape, first, g.request.source, rows)

    def _take_places(self) -> list[int]:
        """One for every node of the frontier, of those that are free."""
        g = self.growth
        if g.drops_nodes:
            alive = {0, *g.best}
            self.places = {node: place for node, place in self.places.items() if node in alive}
        taken = set(self.places.values())
        free = islice((place for place in count() if place not in taken), len(g.frontier))
        self.places |= dict(zip(g.frontier, list(free), strict=True))
        return [self.places[node] for node in g.frontier]

    def parents(self) -> list[int]:
        """Rows of the last pass that the frontier goes on from."""
        return [self.rows[self.growth.parents[node - 1]] for node in self.growth.frontier]

    def passed(self, first: int) -> int:
        """The frontier was looked at, in rows from `first` on; the row after them."""
        self.rows = {node: first + i for i, node in enumerate(self.growth.frontier)}
        return first + len(self.rows)
