"""The seeded faults of `mutants.py` inside an engine: rules, random numbers and drafts with one fault each."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foredraft.certify.step_distribution import RepeatedProbs
from foredraft.drafters.wrapper import DrafterWrapper
from foredraft.request import Batch
from foredraft.sampling.distribution import TokenHistory, distribution
from foredraft.sampling.params import Sampling
from foredraft.tree import Commit, TokenTree
from foredraft.verification.noise import Noise, NoiseTable, SeededNoise
from foredraft.verification.probs import LazyTargetProbs
from foredraft.verification.rule import VerifyFunction

MakeNoise = Callable[[TokenTree, Sequence[tuple[int, int]], Sequence[int]], NoiseTable]


def in_engine(rule: VerifyFunction) -> VerifyFunction:
    """Adapt a rule for tables and trees that begin at their root to the calls of an engine."""

    def verify(tree: TokenTree, p: LazyTargetProbs | RepeatedProbs, noise: Noise) -> Commit:
        indices = [b for b, (root, size) in enumerate(zip(tree.roots, tree.sizes, strict=True)) if root < size]
        paths = [list(range(root)) for root in tree.roots]
        tokens = [list(row) for row in tree.committed_next or [()] * len(tree.sizes)]
        if not indices:
            return Commit.from_lists(paths, tokens)
        cut, rows = _cut_at_roots(tree, indices), range(tree.row_offsets[-1])
        dense = (
            torch.stack([p.get_dense_row(row) for row in rows]).double()
            if isinstance(p, LazyTargetProbs)
            else torch.stack([torch.from_numpy(row.gather(None)) for row in p.rows]).repeat(len(tree.sizes), 1)
        )
        if isinstance(noise, SeededNoise):
            seeds = [noise.seeds[b] for b in indices]
            table = NoiseTable.from_seeds(cut, seeds, [noise.positions[b] + tree.roots[b] for b in indices])
            accept = torch.nn.functional.pad(table.accept_table, (0, 1), value=0.5)  # a rule may read the second column
            noise = replace(table, accept_table=accept)
        commit = rule(cut, dense, noise)
        for i, b in enumerate(indices):
            paths[b] += [node + tree.roots[b] for node in commit.paths[i]]
            tokens[b] += commit.tokens[i]
        return Commit.from_lists(paths, tokens)

    return verify


def _cut_at_roots(tree: TokenTree, indices: Sequence[int]) -> TokenTree:
    one = tree.select(indices)
    pairs = list(zip(one.roots, one.tokens, one.parents, strict=True))
    return TokenTree(
        [tokens[root:] for root, tokens, _ in pairs],
        [[-1, *(parent - root for parent in parents[root + 1 :])] for root, _, parents in pairs],
        one.q,
        num_sampled_children=one.num_sampled_children,
        further_samples=one.further_samples,
    )


def one_by_one(rule: VerifyFunction) -> VerifyFunction:
    """Adapt a rule for one request to batches."""

    def verify(tree: TokenTree, p: Tensor, noise: NoiseTable) -> Commit:
        offsets = tree.row_offsets
        commits = []
        for b in range(len(tree.sizes)):
            rows = torch.arange(*offsets[b : b + 2])
            commits.append(rule(tree.select([b]), p[rows], noise.select([b], rows)))
        return Commit.from_lists([c.paths[0] for c in commits], [c.tokens[0] for c in commits])

    return verify


def make_mutant_noise(make_table: MakeNoise) -> type[SeededNoise]:
    """Make a class in place of `SeededNoise` that takes its numbers from a faulty table."""

    class MutantNoise(SeededNoise):
        @property
        def scored(self) -> list[int]:
            pairs = zip(self.tree.roots, self.tree.sizes, strict=True)
            return [b for b, (root, size) in enumerate(pairs) if root < size]

        @property
        def table(self) -> NoiseTable:
            """Table of the trees that begin at their roots, as the faults read them."""
            positions = [self.positions[b] + self.tree.roots[b] for b in self.scored]
            return make_table(_cut_at_roots(self.tree, self.scored), [self.seeds[b] for b in self.scored], positions)

        def get_key(self, row: int) -> int:
            keys = self.table.keys
            assert keys is not None
            return int(keys[row])

        def accept_uniform(self, b: int, node: int) -> float:
            return self.table.accept_uniform(self.scored.index(b), node - self.tree.roots[b])

        def sample_uniform(self, b: int, node: int) -> float:
            return self.table.sample_uniform(self.scored.index(b), node - self.tree.roots[b])

        def select(self, requests: Sequence[int], rows: Tensor) -> "MutantNoise":
            seeds, positions = [self.seeds[b] for b in requests], [self.positions[b] for b in requests]
            return MutantNoise(self.tree.select(requests), seeds, positions)

    return MutantNoise


def with_histories(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt a faulty distribution, which needs a history per row, to calls without histories."""

    def run(logits: Tensor, sampling: Sampling | Sequence[Sampling], history: Sequence[TokenHistory] | None) -> Tensor:
        rows = [sampling] * len(logits) if isinstance(sampling, Sampling) else list(sampling)
        if all(s.is_greedy for s in rows):
            return distribution(logits, rows, history)
        return compute(logits, rows, list(history or [TokenHistory()] * len(rows)))

    return run


class UnfilteredClaim(DrafterWrapper):
    """Drafter that states a q with mass beyond its filters."""

    def propose(self, batch: Batch) -> TokenTree:
        tree = self.drafter.propose(batch)
        if tree.q is None:
            return tree
        stated = torch.where(tree.q.sum(-1, keepdim=True) > 0, 0.8 * tree.q + 0.2 / tree.q.shape[-1], tree.q)
        return replace(tree, q=stated)


class SoftClaim(DrafterWrapper):
    """Drafter that drafts the likeliest tokens and states their softmax as q."""

    def propose(self, batch: Batch) -> TokenTree:
        tree = self.drafter.propose(batch)
        if tree.q is None:
            return tree
        tokens = [list(row) for row in tree.tokens]
        for b, (root, size) in enumerate(zip(tree.roots, tree.sizes, strict=True)):
            for node in range(root + 1, size):
                tokens[b][node] = int(tree.q[tree.get_row(b, tree.parents[b][node])].argmax())
        return replace(tree, tokens=tokens)
