"""Trees whose shape is known before anything is drafted: paths of ranks, as Medusa publishes them (2401.10774).

A path (0, 2) is the third likeliest token after the likeliest one. This file knows nothing of tokens or models.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from foredraft.errors import ForedraftError

Path = tuple[int, ...]
Accuracies = Sequence[Sequence[float]]  # [depth][rank] chance that this guess is right if those above it are


def usual(depth: int, ranks: int) -> list[list[float]]:
    """Accuracies where nobody measured any: the first guess of head h is right with 0.6 * 0.8^h, as Medusa's are on
    chat (2401.10774, figure 4b, roughly), and guess r with one (r + 1)^2-th of that."""
    return [[0.6 * 0.8**h / (r + 1) ** 2 for r in range(ranks)] for h in range(depth)]


@dataclass(frozen=True, eq=False)
class RankTree:
    """Below the root, `paths` in the order in which they are worth a place: the first n of them are a tree for every n.

    Nodes are numbered breadth first from 1, the root is 0; siblings follow each other by rank.
    """

    paths: tuple[Path, ...]
    _cuts: dict[tuple[int, int], "RankTree"] = field(default_factory=dict, repr=False)

    @classmethod
    def best(cls, accuracies: Accuracies, nodes: int) -> "RankTree":
        """Greedily the `nodes` likeliest paths, a path being as likely as the product of its accuracies (2401.10774,
        section 2.3.3). Optimal where accuracies fall with the rank."""
        return cls(_likeliest(accuracies, nodes))

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]], accuracies: Accuracies | None = None) -> "RankTree":
        """A tree somebody wrote down. Raises ForedraftError naming a path that does not fit.

        accuracies [depth][rank] also bound depth and rank, and order the nodes for smaller budgets.
        """
        given = [_path(path) for path in paths]
        if not given:
            raise ForedraftError("a tree needs at least one path of ranks, such as [0]")
        known = {(), *given}
        for path in given:
            if accuracies is not None:
                _check_reach(path, accuracies)
            if path[:-1] not in known:
                raise ForedraftError(f"the tree has {list(path)} without its parent {list(path[:-1])}; add it")
            elder = (*path[:-1], path[-1] - 1)
            if path[-1] > 0 and elder not in known:
                raise ForedraftError(f"the tree has {list(path)} without its elder sibling {list(elder)}; add it")
        if len(known) <= len(given):
            twice = next(path for i, path in enumerate(given) if path in given[:i])
            raise ForedraftError(f"the tree has {list(twice)} twice")
        depth, width = max(map(len, given)), 1 + max(map(max, given))
        return cls(_likeliest(accuracies or usual(depth, width), len(given), known))

    @classmethod
    def complete(cls, branching: Sequence[int]) -> "RankTree":
        """Every node of a level has the same number of children."""
        paths: list[Path] = [()]
        level: list[Path] = [()]
        for width in branching:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return cls.of(paths[1:])

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def _order(self) -> list[Path]:
        return sorted(self.paths, key=lambda path: (len(path), path))

    @cached_property
    def depth(self) -> int:
        return len(self._order[-1]) if self.paths else 0

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of the nodes from 1 on."""
        return tuple(len(path) for path in self._order)

    def depth_of(self, node: int) -> int:
        """Of any node, the root included."""
        return self.depths[node - 1] if node else 0

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Of the nodes from 1 on, among their siblings."""
        return tuple(path[-1] for path in self._order)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Of the nodes from 1 on."""
        index = {path: i for i, path in enumerate(self._order, 1)} | {(): 0}
        return tuple(index[path[:-1]] for path in self._order)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Of the nodes from 0 on, by rank."""
        below: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents, 1):
            below[parent].append(node)
        return tuple(map(tuple, below))

    @cached_property
    def inner(self) -> tuple[int, ...]:
        """The nodes that have children."""
        return tuple(node for node, below in enumerate(self.children) if below)

    @cached_property
    def draws(self) -> tuple[int, ...]:
        """Of the nodes from 1 on: which of the inner nodes is the parent."""
        index = {node: i for i, node in enumerate(self.inner)}
        return tuple(index[parent] for parent in self.parents)

    @cached_property
    def width(self) -> int:
        """Children of a node at most."""
        return max(map(len, self.children))

    def cut(self, depth: int, nodes: int) -> "RankTree":
        """The `nodes` worthiest, none deeper than `depth`."""
        if depth >= self.depth and nodes >= len(self):
            return self
        made = self._cuts.get((depth, nodes))
        if made is None:
            shallow = [path for path in self.paths if len(path) <= depth]
            made = self._cuts[depth, nodes] = RankTree(tuple(shallow[: max(nodes, 0)]))
        return made


def _path(path: Sequence[int]) -> Path:
    if isinstance(path, str) or not isinstance(path, Sequence) or not path:
        raise ForedraftError(f"a tree is a list of paths of ranks such as [0, 2], got {path!r}")
    if any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in path):
        raise ForedraftError(f"ranks count from 0 in whole numbers, got the path {list(path)}")
    return tuple(path)


def _check_reach(path: Path, accuracies: Accuracies) -> None:
    if len(path) > len(accuracies):
        raise ForedraftError(f"the tree has {list(path)}, deeper than there are heads ({len(accuracies)})")
    for rank, of_head in zip(path, accuracies, strict=False):
        if rank >= len(of_head):
            raise ForedraftError(f"the tree has {list(path)}; ranks lie in 0..{len(of_head) - 1}")


def _likeliest(accuracies: Accuracies, nodes: int, allowed: set[Path] | None = None) -> tuple[Path, ...]:
    """The likeliest paths first, and none before its parent or its elder sibling."""
    taken: list[Path] = []
    chances: dict[Path, float] = {(): 1.0}
    offered: list[tuple[float, int, Path]] = []  # (minus the chance, length, path): a heap

    def offer(parent: Path, rank: int) -> None:
        depth, path = len(parent), (*parent, rank)
        is_known = depth < len(accuracies) and rank < len(accuracies[depth])
        if is_known and (allowed is None or path in allowed):
            chances[path] = chances[parent] * accuracies[depth][rank]
            heapq.heappush(offered, (-chances[path], len(path), path))

    offer((), 0)
    while offered and len(taken) < nodes:
        _, _, path = heapq.heappop(offered)
        taken.append(path)
        offer(path, 0)
        offer(path[:-1], path[-1] + 1)
    return tuple(taken)
