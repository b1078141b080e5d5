"""Trees of ranks: the construction against every tree there is, published trees, and what is refused."""

import itertools
import math
from collections.abc import Iterator

import pytest

from foredraft.drafters.common.static_tree import RankPath, StaticTree, assume_accuracies
from foredraft.errors import ForedraftError

# of the kind that Medusa-1 publishes for a 7B model: lopsided, ten ranks, in no order of breadth or depth
PUBLISHED = [
    [0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [0, 2], [3], [0, 3], [4], [0, 4], [2, 0], [0, 5], [0, 0, 1],
    [5], [0, 6], [6], [0, 7], [0, 1, 0], [1, 1], [7], [0, 8], [0, 0, 2], [3, 0], [0, 9], [8], [9], [1, 0, 0],
]  # fmt: skip
ACCURACIES = [[0.61, 0.17, 0.08, 0.02], [0.45, 0.12, 0.11, 0.01], [0.3, 0.2, 0.05, 0.01]]


def gain(paths: Iterator[RankPath] | tuple[RankPath, ...], accuracies: list[list[float]]) -> float:
    """Tokens a tree adds in expectation."""
    return sum(math.prod(accuracies[d][rank] for d, rank in enumerate(path)) for path in paths)


def every_tree(nodes: int, depth: int, ranks: int) -> Iterator[tuple[RankPath, ...]]:
    """List all trees that hold every node's parent and elder sibling."""
    paths = [p for size in range(1, depth + 1) for p in itertools.product(range(ranks), repeat=size)]
    for chosen in itertools.combinations(paths, nodes):
        held = {(), *chosen}
        if all(p[:-1] in held and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in held) for p in chosen):
            yield chosen


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5])
def test_the_greedy_tree_is_the_best_of_all(nodes: int) -> None:
    """A heap that skips a sibling or a child still gives a tree, only a worse one."""
    best = max(gain(tree, ACCURACIES) for tree in every_tree(nodes, 3, 3))
    tree = StaticTree.from_accuracies(ACCURACIES, nodes)
    assert len(tree) == nodes
    assert gain(tree.paths, ACCURACIES) == pytest.approx(best, abs=1e-12)


def test_every_smaller_budget_is_a_tree_and_the_best_one() -> None:
    whole = StaticTree.from_accuracies(ACCURACIES, 20)
    for nodes in range(1, 21):
        cut = whole.restrict(3, nodes)
        assert cut.paths == StaticTree.from_accuracies(ACCURACIES, nodes).paths
        assert StaticTree.from_paths(cut.paths).depth == cut.depth  # it passes the checks of a tree written by hand


def test_one_guess_per_head_makes_a_chain() -> None:
    tree = StaticTree.from_accuracies([[1.0]] * 5, 5)
    assert (tree.parents, tree.ranks, tree.depths) == ((0, 1, 2, 3, 4), (0,) * 5, (1, 2, 3, 4, 5))
    assert tree.width == 1


def test_nodes_are_numbered_breadth_first_with_siblings_by_rank() -> None:
    tree = StaticTree.from_paths([[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 1, 0]])
    assert tree.depths == (1, 1, 1, 2, 2, 2, 3)
    assert tree.parents == (0, 0, 0, 1, 1, 2, 5)
    assert tree.ranks == (0, 1, 2, 0, 1, 0, 0)
    assert tree.children == ((1, 2, 3), (4, 5), (6,), (), (), (7,), (), ())
    assert tree.inner_nodes == (0, 1, 2, 5)
    assert tree.parent_inner_index == (0, 0, 0, 1, 1, 2, 3)


def test_a_tree_like_the_published_ones_is_taken_as_it_is() -> None:
    tree = StaticTree.from_paths(PUBLISHED, assume_accuracies(4, 10))
    assert sorted(tree.paths) == sorted(map(tuple, PUBLISHED))
    assert (tree.depth, tree.width) == (3, 10)


def test_depth_and_budget_cut_to_trees_of_the_worthiest() -> None:
    tree = StaticTree.from_paths(PUBLISHED, assume_accuracies(4, 10))
    for depth, nodes in itertools.product(range(4), range(30)):
        cut = tree.restrict(depth, nodes)
        held = {(), *cut.paths}
        assert len(cut) <= nodes
        assert cut.depth <= depth
        assert all(p[:-1] in held and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in held) for p in cut.paths)
    assert tree.restrict(9, 99) is tree
    assert tree.restrict(2, 5) is tree.restrict(2, 5)


def test_complete_trees_have_the_same_children_everywhere() -> None:
    tree = StaticTree.from_branching((3, 2, 1))
    assert len(tree) == 3 + 6 + 6
    assert [len(below) for below in tree.children] == [3, *[2] * 3, *[1] * 6, *[0] * 6]


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        ([], "at least one path"),
        ([[0], [1, 0]], r"\[1, 0\] without its parent \[1\]"),
        ([[0], [2]], r"\[2\] without its elder sibling \[1\]"),
        ([[0], [0, 1]], r"\[0, 1\] without its elder sibling \[0, 0\]"),
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], r"deeper than there are heads \(3\)"),
        ([[0], [1], [2], [3], [4]], r"\[4\]; ranks lie in 0..3"),
        ([[0], [0]], r"\[0\] twice"),
        ([[0], [-1]], "count from 0"),
        ([[0], [0.5]], "count from 0"),
        ([0, 1], "list of paths"),
        ([[]], "list of paths"),
    ],
)
def test_what_is_no_tree_is_refused_by_name(paths: list, why: str) -> None:
    with pytest.raises(ForedraftError, match=why):
        StaticTree.from_paths(paths, ACCURACIES)
