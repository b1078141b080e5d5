"""Static trees: token trees of a fixed shape, given as paths of ranks like Medusa's `medusa_choices` (2401.10774).

The path (0, 2) is the third likeliest token below the likeliest one. This file has no tokens and no models.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from foredraft.errors import ForedraftError

FIRST_ACCURACY = 0.6  # assumed accuracy of the likeliest token at depth 0
DEPTH_DECAY = 0.8  # assumed factor per depth
NUM_RANKS = 10  # tokens per head that a tree of heads may use, as in published trees

RankPath = tuple[int, ...]
RankAccuracies = Sequence[
    Sequence[float]
]  # [depth][rank] acceptance rate of this draft token if its ancestors are accepted


def assume_accuracies(depth: int, ranks: int = NUM_RANKS) -> list[list[float]]:
    """Return default accuracies for checkpoints without measured ones.

    Rank r at depth h has the accuracy 0.6 * 0.8^h / (r + 1)^2, near Medusa's on chat data.

    Reference: 2401.10774, figure 4b.
    """
    return [[FIRST_ACCURACY * DEPTH_DECAY**h / (r + 1) ** 2 for r in range(ranks)] for h in range(depth)]


@dataclass(frozen=True, eq=False)
class StaticTree:
    """Fixed tree shape. Node 0 is the root; the others are numbered breadth first from 1, siblings by rank.

    `paths` has one path per node below the root, by priority: for every n, the first n paths are a tree.
    """

    paths: tuple[RankPath, ...]
    _restricted_trees: dict[tuple[int, int], "StaticTree"] = field(default_factory=dict, repr=False)

    @classmethod
    def from_accuracies(cls, accuracies: RankAccuracies, nodes: int) -> "StaticTree":
        """Make the tree of the `nodes` likeliest paths; a path's probability is the product of its accuracies.

        The greedy choice is optimal if accuracies do not increase with the rank.

        Reference: 2401.10774, section 2.3.3.
        """
        return cls(_select_likeliest_paths(accuracies, nodes))

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], accuracies: RankAccuracies | None = None) -> "StaticTree":
        """Make a tree of explicit paths.

        Args:
            paths: one path of ranks per node, in any order.
            accuracies: [depth][rank]; they bound depth and rank, and order the nodes for smaller budgets.

        Raises:
            ForedraftError: for an invalid, missing or repeated path, with its name.
        """
        parsed = [_parse_path(path) for path in paths]
        if not parsed:
            raise ForedraftError("a tree needs at least one path of ranks, such as [0]")
        nodes = {(), *parsed}
        for path in parsed:
            if accuracies is not None:
                _check_reach(path, accuracies)
            if path[:-1] not in nodes:
                raise ForedraftError(f"the tree has {list(path)} without its parent {list(path[:-1])}; add it")
            elder = (*path[:-1], path[-1] - 1)
            if path[-1] > 0 and elder not in nodes:
                raise ForedraftError(f"the tree has {list(path)} without its elder sibling {list(elder)}; add it")
        if len(nodes) <= len(parsed):
            twice = next(path for i, path in enumerate(parsed) if path in parsed[:i])
            raise ForedraftError(f"the tree has {list(twice)} twice")
        depth, width = max(map(len, parsed)), 1 + max(map(max, parsed))
        return cls(_select_likeliest_paths(accuracies or assume_accuracies(depth, width), len(parsed), nodes))

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> "StaticTree":
        """Make the tree in which every node at depth d has branching[d] children."""
        paths: list[RankPath] = [()]
        level: list[RankPath] = [()]
        for width in branching:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return cls.from_paths(paths[1:])

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def _sorted_paths(self) -> list[RankPath]:
        return sorted(self.paths, key=lambda path: (len(path), path))

    @cached_property
    def depth(self) -> int:
        return len(self._sorted_paths[-1]) if self.paths else 0

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node from 1 on."""
        return tuple(len(path) for path in self._sorted_paths)

    def get_depth(self, node: int) -> int:
        """Return the depth of a node; 0 for the root."""
        return self.depths[node - 1] if node else 0

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node from 1 on among its siblings."""
        return tuple(path[-1] for path in self._sorted_paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Parent of each node from 1 on."""
        index = {path: i for i, path in enumerate(self._sorted_paths, 1)} | {(): 0}
        return tuple(index[path[:-1]] for path in self._sorted_paths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node from 0 on, by rank."""
        below: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents, 1):
            below[parent].append(node)
        return tuple(map(tuple, below))

    @cached_property
    def inner_nodes(self) -> tuple[int, ...]:
        """Nodes with children, the root included."""
        return tuple(node for node, below in enumerate(self.children) if below)

    @cached_property
    def parent_inner_index(self) -> tuple[int, ...]:
        """Index into `inner_nodes` of the parent of each node from 1 on."""
        index = {node: i for i, node in enumerate(self.inner_nodes)}
        return tuple(index[parent] for parent in self.parents)

    @cached_property
    def width(self) -> int:
        """Maximum number of children of a node."""
        return max(map(len, self.children))

    def restrict(self, depth: int, nodes: int) -> "StaticTree":
        """Return the tree of the first `nodes` paths that are no deeper than `depth`."""
        if depth >= self.depth and nodes >= len(self):
            return self
        restricted = self._restricted_trees.get((depth, nodes))
        if restricted is None:
            shallow = [path for path in self.paths if len(path) <= depth]
            restricted = self._restricted_trees[depth, nodes] = StaticTree(tuple(shallow[: max(nodes, 0)]))
        return restricted


def _parse_path(path: Sequence[int]) -> RankPath:
    if isinstance(path, str) or not isinstance(path, Sequence) or not path:
        raise ForedraftError(f"a tree is a list of paths of ranks such as [0, 2], got {path!r}")
    if any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in path):
        raise ForedraftError(f"ranks count from 0 in whole numbers, got the path {list(path)}")
    return tuple(path)


def _check_reach(path: RankPath, accuracies: RankAccuracies) -> None:
    if len(path) > len(accuracies):
        raise ForedraftError(f"the tree has {list(path)}, deeper than there are heads ({len(accuracies)})")
    for rank, head_accuracies in zip(path, accuracies, strict=False):
        if rank >= len(head_accuracies):
            raise ForedraftError(f"the tree has {list(path)}; ranks lie in 0..{len(head_accuracies) - 1}")


def _select_likeliest_paths(
    accuracies: RankAccuracies, nodes: int, allowed: set[RankPath] | None = None
) -> tuple[RankPath, ...]:
    """Return the likeliest paths, likeliest first, each after its parent and its elder sibling.

    Args:
        accuracies: [depth][rank].
        nodes: maximum number of paths.
        allowed: paths to choose from; None = all within `accuracies`.
    """
    selected: list[RankPath] = []
    probs: dict[RankPath, float] = {(): 1.0}
    heap: list[tuple[float, int, RankPath]] = []  # (-probability, length, path)

    def push(parent: RankPath, rank: int) -> None:
        depth, path = len(parent), (*parent, rank)
        is_valid = depth < len(accuracies) and rank < len(accuracies[depth])
        if is_valid and (allowed is None or path in allowed):
            probs[path] = probs[parent] * accuracies[depth][rank]
            heapq.heappush(heap, (-probs[path], len(path), path))

    push((), 0)
    while heap and len(selected) < nodes:
        _, _, path = heapq.heappop(heap)
        selected.append(path)
        push(path, 0)
        push(path[:-1], path[-1] + 1)
    return tuple(selected)
