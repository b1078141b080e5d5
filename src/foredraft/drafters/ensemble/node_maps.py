"""Positions of the members' nodes in the verified tree."""

from dataclasses import dataclass, field

from foredraft.drafters.ensemble.tree_merge import map_path_to_member
from foredraft.request import Batch
from foredraft.tree import Commit


@dataclass
class NodeMaps:
    """Map of every member and request of a step: node in the verified tree by the member's own node.

    A member without a map for a request has the same nodes as the verified tree. The map [0] has the root alone.
    """

    maps: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (member, b)

    def clear(self) -> None:
        self.maps.clear()

    def set(self, member: int, b: int, node_map: list[int]) -> None:
        self.maps[member, b] = node_map

    def drop(self, member: int, b: int) -> None:
        """Record that the verified tree of request b is the member's own."""
        del self.maps[member, b]

    def map_paths(self, member: int, batch: Batch, commit: Commit) -> list[list[int]]:
        """Return the accepted paths in the member's own nodes; `commit.paths` itself if they are the same."""
        if not any(len(commit.paths[b]) > batch.num_new_tokens[b] for (i, b) in self.maps if i == member):
            return commit.paths
        return [
            map_path_to_member(path, batch.num_new_tokens[b] - 1, self.maps[member, b])
            if (member, b) in self.maps
            else path
            for b, path in enumerate(commit.paths)
        ]
