"""Shapes of recorded drafts: how many nodes every level has at most, and which children are expanded next."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import pairwise

from foredraft.drafters.common.static_tree import RankPath, StaticTree
from foredraft.drafters.common.tree_builder import TreeSpec


@dataclass(frozen=True)
class FixedLevel:
    """Nodes with children at one depth of a fixed tree, in the order of the draft."""

    paths: tuple[RankPath, ...]  # of the nodes
    width: int  # most children of a node
    next_rows: tuple[int, ...]  # by node of the next level: index of its parent * width + its rank


@dataclass(frozen=True, eq=False)  # compared by identity: there is one of every kind
class FixedShape:
    """Chain or static tree, cut to the levels of a plan. Requests may have any part of it."""

    levels: tuple[FixedLevel, ...]
    _counts: dict[StaticTree | int, list[int] | None] = field(default_factory=dict, repr=False)

    @classmethod
    @cache
    def from_chain(cls, depth: int) -> "FixedShape":
        """Return the shape of a chain."""
        return cls._from_paths([(0,) * d for d in range(1, depth + 1)], depth)

    @classmethod
    @lru_cache(maxsize=256)
    def from_tree(cls, tree: StaticTree, depth: int) -> "FixedShape":
        """Return the shape of the first `depth` levels of a tree."""
        return cls._from_paths([path for path in tree.paths if len(path) <= depth], depth)

    @classmethod
    def _from_paths(cls, paths: Sequence[RankPath], depth: int) -> "FixedShape":
        num_children = Counter(path[:-1] for path in paths)
        inner = [sorted(path for path in num_children if len(path) == d) for d in range(depth + 1)]
        levels = []
        for nodes, following in pairwise(inner):
            index, width = {path: i for i, path in enumerate(nodes)}, max(num_children[path] for path in nodes)
            levels.append(FixedLevel(tuple(nodes), width, tuple(index[p[:-1]] * width + p[-1] for p in following)))
        return cls(tuple(levels))

    @property
    def depth(self) -> int:
        return len(self.levels)

    @property
    def num_nodes(self) -> int:
        """Number of nodes with children, the root included."""
        return sum(len(level.paths) for level in self.levels)

    def count_children(self, spec: TreeSpec) -> list[int] | None:
        """Count the children that a request's draft gives to every node of the shape, level by level.

        Returns:
            The counts; None if the draft does not fit into the shape.
        """
        key = spec.max_depth if spec.static_tree is None else spec.static_tree
        if key not in self._counts:
            self._counts[key] = self._count_children(spec)
        return self._counts[key]

    def _count_children(self, spec: TreeSpec) -> list[int] | None:
        counts: Mapping[RankPath, int]
        if spec.static_tree is None:
            counts = {(0,) * d: 1 for d in range(spec.max_depth)}
        else:
            counts = Counter(path[:-1] for path in spec.static_tree.paths)
        found = [counts.get(path, 0) for level in self.levels for path in level.paths]
        return found if sum(found) == sum(counts.values()) else None


@dataclass(frozen=True)
class DynamicShape:
    """Dynamic tree: `width` children of every expanded node, and `width` expanded nodes per level below the root."""

    width: int
    depth: int
    max_nodes: int  # nodes of a draft at most
