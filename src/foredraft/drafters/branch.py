"""A draft that grows over paged memory: every node that is looked at takes the next place after what is committed."""

from dataclasses import dataclass, field

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
        g, first = self.growth, len(self.places)
        for node in g.frontier:
            self.places[node] = len(self.places)
        depths = [g.depths[node] for node in self.places]
        parents = [-1, *(self.places[g.parents[node - 1]] for node in list(self.places)[1:])]
        is_chain = parents == list(range(-1, len(parents) - 1))
        tokens = [g.tokens[node - 1] for node in g.frontier]
        shape = None if is_chain else parents
        return Span(g.request.pages, self.start, tokens, depths, shape, first, g.request.source)

    def parents(self) -> list[int]:
        """Rows of the last pass that the frontier goes on from."""
        return [self.rows[self.growth.parents[node - 1]] for node in self.growth.frontier]

    def passed(self, first: int) -> int:
        """The frontier was looked at, in rows from `first` on; the row after them."""
        self.rows = {node: first + i for i, node in enumerate(self.growth.frontier)}
        return first + len(self.rows)
