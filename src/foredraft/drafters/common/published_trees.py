"""Trees of heads by their published names: `medusa_choices` of Medusa's authors, each of 63 nodes.

A tree is stored as the number of children of every inner node. The digits before the colon are the ranks from the root
to the node; "-" is the root. So "-:3 0:2" is three children of the root, and two children of the first of them.

Reference: Medusa, 2401.10774, and FasterDecoding/Medusa, `medusa/model/medusa_choices.py`.
"""

from collections.abc import Sequence

from foredraft.errors import ForedraftError, suggest

RankPaths = Sequence[Sequence[int]]
ROOT = "-"
# fmt: off
CHILD_COUNTS = {
    "mc_sim_7b_63":
        "-:10 0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1 000:2",
    "vicuna_7b_stage1":
        "-:10 0:10 1:7 2:4 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 05:1 10:2 20:1 000:1",
    "vicuna_7b_stage1_ablation":
        "-:10 0:10 1:4 2:2 3:2 4:1 5:1 6:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 001:1 002:1 010:1",
    "vicuna_7b_stage2":
        "-:10 0:10 1:5 2:2 3:2 4:1 5:1 6:1 7:1 00:9 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:4 001:1 002:1 010:1",
    "vicuna_13b_stage1":
        "-:10 0:10 1:7 2:4 3:2 4:2 5:1 6:1 7:1 8:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:1",
    "vicuna_13b_stage2":
        "-:10 0:10 1:4 2:2 3:1 4:1 5:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 001:2 002:1 010:1 "
        "100:1",
    "vicuna_33b_stage1":
        "-:10 0:10 1:8 2:5 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 10:2 20:1",
    "vicuna_33b_stage2":
        "-:10 0:10 1:5 2:3 3:2 4:1 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:3 001:1 010:1",
    "zephyr_stage2":
        "-:10 0:10 1:6 2:4 3:2 4:2 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:2 001:1",
}
# fmt: on


def resolve_tree(tree: str | RankPaths) -> RankPaths:
    """Return the rank paths of a tree.

    Args:
        tree: a published name, or the paths themselves.

    Raises:
        ForedraftError: for an unknown name.
    """
    if not isinstance(tree, str):
        return tree
    counts = CHILD_COUNTS.get(tree)
    if counts is None:
        raise ForedraftError(
            f"unknown tree {tree!r:.60}; give a list of paths of ranks such as [[0], [0, 0]], or one of "
            f"{', '.join(CHILD_COUNTS)}{suggest(tree, CHILD_COUNTS)}"
        )
    return [path for entry in counts.split() for path in _list_children(*entry.split(":"))]


def _list_children(parent: str, count: str) -> list[tuple[int, ...]]:
    ranks = () if parent == ROOT else tuple(map(int, parent))
    return [(*ranks, rank) for rank in range(int(count))]
