"""Hidden states of the target along committed paths: noted after every step, gathered when they are read.

A drafter at rest thus pays for a reference alone. A reference keeps the hidden states of its whole forward pass in
memory, so `PathFeatures.keep` copies rows that are a small part of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_REFERENCED_ROWS = 64  # rows of a pass up to which `keep` notes a reference to all of them


class FeatureRows(NamedTuple):
    """Some rows of the hidden states of a forward pass, by reference."""

    rows: Tensor  # [T, F]
    indices: Sequence[int]  # n rows
    columns: tuple[int, ...] = ()  # hidden layers to select; () = all
    num_layers: int = 1  # hidden layers of `rows`

    def read(self) -> Tensor:
        """Return the rows, [n, F] of the selected layers; a view if they are consecutive."""
        first, n = (self.indices[0], len(self.indices)) if self.indices else (0, 0)
        is_consecutive = not n or list(self.indices) == list(range(first, first + n))
        rows = self.rows[first : first + n] if is_consecutive else self.rows[list(self.indices)]
        return select_columns(rows, self.columns, self.num_layers) if self.columns else rows

    def read_row(self, i: int) -> Tensor:
        """Return row i [F] of the selected layers; a view if they are adjacent."""
        row = self.rows[self.indices[i]]
        return select_columns(row, self.columns, self.num_layers) if self.columns else row


@dataclass(frozen=True, eq=False)
class PathFeatures:
    """Hidden states of the target at the nodes of every request's committed path."""

    rows: Tensor  # [T, F] of all nodes of the pass; later passes do not overwrite them
    num_rows: int  # T
    indices: Sequence[Sequence[int]]  # B: rows of the nodes of a path
    columns: tuple[int, ...] = ()  # hidden layers to select; () = all
    num_layers: int = 1  # hidden layers of `rows`, if `columns` are given

    @classmethod
    def from_pass(cls, rows: Tensor, sizes: Sequence[int], paths: Sequence[Sequence[int]]) -> "PathFeatures":
        """Note the paths of a step.

        Args:
            rows: hidden states [T, F] of the nodes of all trees, tree by tree.
            sizes: nodes of each tree, [B].
            paths: B committed paths of nodes.
        """
        if len(paths) == 1:
            return cls(rows, sizes[0], (tuple(paths[0]),))
        indices, first = [], 0
        for path, size in zip(paths, sizes, strict=True):
            indices.append([first + node for node in path])
            first += size
        return cls(rows, first, indices)

    @classmethod
    def from_padded(cls, features: Tensor, counts: Sequence[int]) -> "PathFeatures":
        """Make the object of features [B, P, F], whose rows count from the start of each request's path."""
        width = features.shape[1]
        return cls(
            features.flatten(0, 1), len(counts) * width, [range(b * width, b * width + n) for b, n in enumerate(counts)]
        )

    def truncate(self, counts: Sequence[int]) -> "PathFeatures":
        """Return the first counts[b] rows of request b."""
        indices = [row[:n] for row, n in zip(self.indices, counts, strict=True)]
        return PathFeatures(self.rows, self.num_rows, indices, self.columns, self.num_layers)

    def select_layers(self, columns: Sequence[int], num_layers: int) -> "PathFeatures":
        """Return the features of some of the hidden layers.

        Args:
            columns: indices of the layers.
            num_layers: hidden layers of these features.
        """
        if self.columns:
            raise ValueError("layers were selected already")
        return PathFeatures(self.rows, self.num_rows, self.indices, tuple(columns), num_layers)

    def get_rows(self, b: int) -> FeatureRows:
        """Return the rows of request b, by reference."""
        return FeatureRows(self.rows, self.indices[b], self.columns, self.num_layers)

    def keep(self, b: int, count: int | None = None) -> FeatureRows:
        """Return rows of request b for a later step, without other rows of the pass if those are many.

        A reference keeps at most max(MAX_REFERENCED_ROWS, 2 B) rows in memory, or twice the rows that it is for.

        Args:
            b: batch index.
            count: number of last rows of the path; None = all.
        """
        indices = self.indices[b] if count is None else self.indices[b][-count:]
        found = FeatureRows(self.rows, indices, self.columns, self.num_layers)
        num_rows = self.num_rows
        if num_rows <= MAX_REFERENCED_ROWS or num_rows <= 2 * max(len(self.indices), len(indices)):
            return found
        return FeatureRows(found.read().clone(), range(len(indices)))

    def gather(self) -> Tensor:
        """Return the features [B, P, F], padded with zeros to the longest path."""
        found = [self.get_rows(b).read() for b in range(len(self.indices))]
        if len(found) == 1:
            return found[0][None]
        gathered = found[0].new_zeros(len(found), max(map(len, self.indices)), found[0].shape[-1])
        for b, rows in enumerate(found):
            gathered[b, : len(rows)] = rows
        return gathered


def read_all(parts: Sequence[FeatureRows]) -> Tensor:
    """Return the rows of several parts, [n, F]."""
    rows = [part.read() for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def select_columns(features: Tensor, columns: Sequence[int], num_layers: int) -> Tensor:
    """Return some hidden layers of features [.., num_layers * H]; a view if they are adjacent."""
    width = features.shape[-1] // num_layers
    if list(columns) == list(range(columns[0], columns[0] + len(columns))):
        return features[..., columns[0] * width : (columns[-1] + 1) * width]
    return torch.cat([features[..., c * width : (c + 1) * width] for c in columns], -1)
