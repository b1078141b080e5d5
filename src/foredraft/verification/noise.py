"""Random numbers of a verification, as a function of seeds and sequence positions or as tables.

Nodes, rows and roots are defined by the picture at the top of `tree.py`. A noise key is the 64-bit key of the random
numbers with which `rng.exponential_race` samples one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foredraft.sampling import rng
from foredraft.sampling.rng import NoiseStream
from foredraft.tree import TokenTree


class Noise(Protocol):
    """Random numbers of one verification, by row of p or by batch index b and node."""

    def get_key(self, row: int) -> int | None:
        """Return the noise key of the token that is sampled from a row of p; None if every row of p is one-hot."""

    def accept_uniform(self, b: int, node: int) -> float:
        """Return the uniform that accepts or rejects a draft node."""

    def sample_uniform(self, b: int, node: int) -> float:
        """Return the uniform that samples the token after `node`, if `node` is the last accepted one."""

    def select(self, requests: Sequence[int], rows: Tensor) -> "Noise":
        """Return the noise of these batch indices, in the given order; `rows` are their rows of p."""


@dataclass(frozen=True)
class SeededNoise:
    """Noise from seeds and sequence positions, computed on demand.

    The noise key of a sampled token depends only on the token's position in the sequence. The uniforms also depend on
    the position of the step's root: a later step must not reuse a uniform by which an earlier step rejected.
    """

    tree: TokenTree
    seeds: Sequence[tuple[int, int]]  # B pairs (seed, sample index)
    positions: Sequence[int]  # B sequence positions of node 0

    def get_key(self, row: int) -> int:
        b, node = self.tree.locate_row(row)
        return rng.derive_key(*self.seeds[b], NoiseStream.TOKEN, self.positions[b] + self.tree.depths[b][node] + 1)

    def accept_uniform(self, b: int, node: int) -> float:
        return self._uniform(NoiseStream.ACCEPT, b, node)

    def sample_uniform(self, b: int, node: int) -> float:
        return self._uniform(NoiseStream.RESIDUAL, b, node)

    def select(self, requests: Sequence[int], rows: Tensor) -> "SeededNoise":
        seeds, positions = [self.seeds[b] for b in requests], [self.positions[b] for b in requests]
        return SeededNoise(self.tree.select(requests), seeds, positions)

    def _uniform(self, stream: NoiseStream, b: int, node: int) -> float:
        root = self.tree.roots[b]
        return rng.uniform(*self.seeds[b], stream, self.positions[b] + root, node - root)


@dataclass(frozen=True)
class NoiseTable:
    """Noise as tables, for tests and for rules that run outside an engine."""

    keys: Tensor | None  # [R] int64 noise keys of the target's samples; None if every row of p is one-hot
    accept_table: Tensor  # [B, N] float64 uniforms that accept or reject draft nodes
    sample_table: Tensor  # [B, N] float64 uniforms that sample the token after the last accepted node

    @classmethod
    def from_seeds(cls, tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> "NoiseTable":
        """Tabulate a `SeededNoise` with the same arguments."""
        noise = SeededNoise(tree, seeds, positions)
        # Nodes without a row keep 0.5, which no rule reads.
        accept, sample = torch.full((2, len(tree.sizes), max(tree.sizes)), 0.5, dtype=torch.float64)
        for b, (root, size) in enumerate(zip(tree.roots, tree.sizes, strict=True)):
            for node in range(root, size):
                accept[b, node], sample[b, node] = noise.accept_uniform(b, node), noise.sample_uniform(b, node)
        keys = [noise.get_key(row) for row in range(tree.row_offsets[-1])]
        return cls(torch.tensor(keys, dtype=torch.int64), accept, sample)

    def get_key(self, row: int) -> int | None:
        return None if self.keys is None else int(self.keys[row])

    def accept_uniform(self, b: int, node: int) -> float:
        return float(self.accept_table[b, node])

    def sample_uniform(self, b: int, node: int) -> float:
        return float(self.sample_table[b, node])

    def select(self, requests: Sequence[int], rows: Tensor) -> "NoiseTable":
        indices = list(requests)
        keys = None if self.keys is None else self.keys[rows.to(self.keys.device)]
        return NoiseTable(keys, self.accept_table[indices], self.sample_table[indices])
