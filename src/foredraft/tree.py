"""Token trees, and the path of a tree that a verification commits.

Pure data: no model, no randomness. Every step is one tree per request, prompt chunks and plain decoding included.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import index, sub
from typing import Generic, TypeVar, overload

import torch
from torch import Tensor

from foredraft.path_features import PathFeatures

T = TypeVar("T")

# Layout of one request b in a step: a chunk of 3 committed tokens (a b c) and 3 draft nodes (c -> d -> f, c -> e).
#
#                                              d --- f
#                              a --- b --- c <
#                                              e
#
#   node              0      1      2      3      4      5        index into tokens[b] and parents[b]
#   tokens[b]         a      b      c      d      e      f
#   parents[b]       -1      0      1      2      2      3        a parent stands before its children
#   committed_next    b      c                                    tokens that follow the nodes before the root
#   roots[b]                        2                             node of the last committed token
#   row of p and q                  r     r+1    r+2    r+3       r = row_offsets[b]; only "scored" nodes have a row
#
# A row holds the distribution of the token AFTER its node: p decides on the children of the node, q proposed them.
# Rows of all requests are packed one after another, so p and q are [R, V] with R = row_offsets[-1].
# If a chunk ends before the last committed token, every node has a committed successor: roots[b] == sizes[b], no rows.
#
# The commit of this tree, if the target accepts d, rejects f, and samples x after d:
#
#   paths[b]          0      1      2      3                      nodes whose KV entries stay
#   tokens[b]         b      c      d      x                      token after each node; x corrects f


class lazy_property(Generic[T]):  # noqa: N801 - a decorator
    """functools.cached_property without its lock.

    Until Python 3.12 the lock takes longer than most properties of this file.
    """

    def __init__(self, compute: Callable[..., T]) -> None:
        self._compute, self._name, self.__doc__ = compute, compute.__name__, compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> "lazy_property[T]": ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> "lazy_property[T] | T":
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


@dataclass(frozen=True, eq=False)
class SampledSiblings:
    """Children of one node that one drafter sampled: one more drafter of a merged tree, or one with replacement."""

    q: Tensor  # [V] distribution that they were sampled from
    # Their nodes in the order of sampling, counted from the root; some may be children of an earlier drafter too.
    children: tuple[int, ...]
    # Sampled with replacement, independently of each other: equal samples share a node, which comes once for each.
    is_independent: bool = False


@dataclass(frozen=True)
class TokenTree:
    """Tokens that one forward pass of the target verifies: one tree per request.

    The leading nodes are committed tokens whose successor is committed too: a prompt chunk, or the tokens that a
    preempted request computes again. They cannot be rejected, and they have no rows in p and q. The next node is the
    root: the last committed token. All nodes after the root are draft nodes. A picture is at the top of this file.
    """

    tokens: list[list[int]]  # B lists of N token ids
    parents: list[list[int]]  # B lists of N node indices: parents[b][0] == -1, otherwise parents[b][n] < n
    # [R, V] by row. Sampled children of a node were sampled in order, without replacement, from the row of that node.
    # A row of zeros, or no q at all: the children are deterministic draft tokens, with a one-hot q.
    q: Tensor | None = None
    committed_next: tuple[tuple[int, ...], ...] | None = None  # B rows: tokens that follow the nodes before the root
    # [R] leading children that were sampled from q; the others are deterministic draft tokens. None = all were sampled.
    num_sampled_children: tuple[int, ...] | None = None
    predicted: frozenset[int] = frozenset()  # batch indices of requests whose draft is copied from their prediction
    # Samples with replacement, and those of further drafters of a merged tree, by batch index and parent (counted from
    # the root). Those below one parent are verified in this order, after the children sampled from `q`.
    further_samples: Mapping[tuple[int, int], tuple[SampledSiblings, ...]] | None = None
    # By batch index of a chain: predicted probability, for every draft node, that it is accepted if its parent is. The
    # draft-length policy reads them after the step; verification does not.
    confidences: Mapping[int, tuple[float, ...]] | None = None

    @classmethod
    def from_lists(
        cls, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], q: Tensor | None = None
    ) -> "TokenTree":
        """Build trees from B lists of token ids and B lists of parent indices."""
        return cls([list(map(index, row)) for row in tokens], [list(map(index, row)) for row in parents], q)

    @classmethod
    def from_chains(cls, tokens: Sequence[Sequence[int]], q: Tensor | None = None) -> "TokenTree":
        """Build one chain per request: the last committed token, then its draft tokens."""
        return cls.from_lists(tokens, [range(-1, len(row) - 1) for row in tokens], q)

    def copy(self) -> "TokenTree":
        """Return the same trees with new lists; q is shared."""
        tokens, parents = [list(row) for row in self.tokens], [list(row) for row in self.parents]
        num_sampled = None if self.num_sampled_children is None else tuple(self.num_sampled_children)
        further = None if self.further_samples is None else dict(self.further_samples)
        predicted, confidences = frozenset(self.predicted), None if self.confidences is None else dict(self.confidences)
        return TokenTree(tokens, parents, self.q, self.committed_next, num_sampled, predicted, further, confidences)

    @lazy_property
    def sizes(self) -> list[int]:
        """Return the number of nodes of each request, as [B]."""
        return list(map(len, self.tokens))

    @lazy_property
    def roots(self) -> list[int]:
        """Return the node of the last committed token of each request, as [B].

        Equal to the size if the chunk ends before the last committed token: such a request has no rows and no draft.
        """
        return [len(following) for following in self.committed_next] if self.committed_next else [0] * len(self.sizes)

    @lazy_property
    def children(self) -> list[list[list[int]]]:
        """Draft children of every node, in proposal order: children[b][node] is a list of nodes."""
        result = []
        for parents, root in zip(self.parents, self.roots, strict=True):
            below: list[list[int]] = [[] for _ in parents]
            for node in range(root + 1, len(parents)):
                below[parents[node]].append(node)
            result.append(below)
        return result

    @lazy_property
    def depths(self) -> list[list[int]]:
        """Distance of every node from node 0: depths[b][node]."""
        result = []
        for parents in self.parents:
            depth: list[int] = []
            for parent in parents:
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
            result.append(depth)
        return result

    @lazy_property
    def row_offsets(self) -> list[int]:
        """First row of each request, then R. [B + 1] Request b has rows row_offsets[b] to row_offsets[b + 1] - 1."""
        return [0, *accumulate(map(sub, self.sizes, self.roots))]

    def get_row(self, b: int, node: int) -> int:
        """Return the row of p and q that belongs to a scored node (the root or a draft node)."""
        return self.row_offsets[b] + node - self.roots[b]

    def locate_row(self, row: int) -> tuple[int, int]:
        """Return (batch index, node) of a row of p and q: the inverse of `get_row`."""
        b = bisect_right(self.row_offsets, row) - 1
        return b, row - self.row_offsets[b] + self.roots[b]

    @lazy_property
    def is_chain(self) -> bool:
        return all(parents == list(range(-1, len(parents) - 1)) for parents in self.parents)

    def build_ancestor_mask(self, b: int) -> Tensor:
        """Return [N, N] bool: entry (i, j) is true if node j is node i or an ancestor of it."""
        parents = self.parents[b]
        mask = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def get_draft_path(self, b: int, node: int) -> list[int]:
        """Return the draft tokens on the path from the root (excluded) to a node (included)."""
        tokens, parents, root = self.tokens[b], self.parents[b], self.roots[b]
        result = []
        while node > root:
            result.append(tokens[node])
            node = parents[node]
        return result[::-1]

    def select(self, requests: Sequence[int]) -> "TokenTree":
        """Return the trees of these batch indices, in the given order."""
        indices = list(requests)
        q = None if self.q is None else torch.cat([self.q[slice(*self.row_offsets[b : b + 2])] for b in indices])
        committed_next = None if self.committed_next is None else tuple(self.committed_next[b] for b in indices)
        num_sampled = None
        if self.num_sampled_children is not None:
            num_sampled = tuple(
                count for b in indices for count in self.num_sampled_children[slice(*self.row_offsets[b : b + 2])]
            )
        predicted = frozenset(i for i, b in enumerate(indices) if b in self.predicted)
        tokens, parents = [self.tokens[b] for b in indices], [self.parents[b] for b in indices]
        further = None
        if self.further_samples is not None:
            items = self.further_samples.items()
            further = {(i, node): found for i, b in enumerate(indices) for (owner, node), found in items if owner == b}
        confidences = None
        if self.confidences is not None:
            confidences = {i: self.confidences[b] for i, b in enumerate(indices) if b in self.confidences}
        return TokenTree(tokens, parents, q, committed_next, num_sampled, predicted, further, confidences)

    def prepend_committed(
        self, prefixes: Sequence[Sequence[int]], committed_next: Sequence[Sequence[int]]
    ) -> "TokenTree":
        """Return the trees with committed tokens before their roots: a draft's tree becomes the tree of a step.

        Args:
            prefixes: B rows of committed tokens that the step computes before each root.
            committed_next: B rows with the successor of each prefix token. If node 0 of a draft's tree has a committed
                successor too, the row ends with it, and that tree must have no draft nodes.
        """
        tokens, parents = [], []
        for prefix, draft_tokens, draft_parents in zip(prefixes, self.tokens, self.parents, strict=True):
            shift = len(prefix)
            tokens.append([*prefix, *draft_tokens])
            parents.append([*range(-1, shift), *[parent + shift for parent in draft_parents[1:]]])
        return TokenTree(
            tokens,
            parents,
            self.q,
            tuple(tuple(row) for row in committed_next),
            self.num_sampled_children,
            self.predicted,
            self.further_samples,  # counted from the roots
            self.confidences,
        )


@dataclass(frozen=True)
class TargetArgmax:
    """Target argmax after every scored node of a forward pass, rejected nodes included.

    For drafters with `needs_target_argmax`. Lookup is by path of tokens, because the verified tree may be that of
    another drafter or a merge of several trees.
    """

    tree: TokenTree
    tokens: Sequence[int]  # R

    def look_up(self, b: int, path: Sequence[int]) -> int | None:
        """Return the target argmax after a path of draft tokens below a root.

        Returns None if the pass has no node with this path, or if the logits after it were not finite.
        """
        tree, tokens = self.tree, self.tree.tokens[b]
        nodes = [tree.roots[b]] if tree.roots[b] < tree.sizes[b] else []
        for token in path:  # siblings may hold equal tokens; the nodes below each of them continue the same sequence
            nodes = [child for node in nodes for child in tree.children[b][node] if tokens[child] == token]
        argmax = self.tokens[tree.get_row(b, nodes[0])] if nodes else -1
        return argmax if argmax >= 0 else None


@dataclass(frozen=True)
class TargetCandidates:
    """Likeliest tokens of the target after every scored node of a forward pass, rejected nodes included.

    For drafters with `num_target_candidates`.
    """

    tree: TokenTree
    rows: Sequence[tuple[int, ...]]  # R rows, the likeliest first; () if the logits were not finite

    def list_scored(self) -> list[tuple[int, tuple[int, ...]]]:
        """List the token of each scored node with the candidates after it, in the order of the rows."""
        spans = zip(self.tree.tokens, self.tree.roots, self.tree.sizes, strict=True)
        tokens = [token for row, root, size in spans for token in row[root:size]]
        return [(token, row) for token, row in zip(tokens, self.rows, strict=True) if row]


@dataclass(frozen=True)
class Commit:
    """Accepted path of every request: nodes of its tree, and the token that follows each node.

    The path begins at node 0 and includes the nodes before the root. Each token but the last is that of the next node.
    The last token has no KV entry yet. It is the bonus token, the corrected token, or the token of plain decoding, all
    of them from the target. There are two exceptions: it is an accepted draft token if the output ends with it, or if
    the logits after it are invalid.
    """

    paths: list[list[int]]  # B lists of P accepted nodes, node 0 first
    tokens: list[list[int]]  # B lists of P tokens: tokens[b][i] follows node paths[b][i]
    path_features: PathFeatures | None = None  # hidden states of the target at the paths, gathered by `features`
    failed: frozenset[int] = frozenset()  # batch indices with invalid logits: nothing is committed for them
    target_argmax: TargetArgmax | None = None  # for drafters with `needs_target_argmax`
    target_candidates: TargetCandidates | None = None  # for drafters with `num_target_candidates`

    @classmethod
    def from_lists(
        cls,
        paths: Sequence[Sequence[int]],
        tokens: Sequence[Sequence[int]],
        features: Tensor | None = None,
        failed: frozenset[int] = frozenset(),
        target_argmax: TargetArgmax | None = None,
    ) -> "Commit":
        """Build a commit from B paths and B rows of tokens of equal lengths, and features [B, P, F]."""
        found = None if features is None else PathFeatures.from_padded(features, list(map(len, paths)))
        return cls(list(map(list, paths)), list(map(list, tokens)), found, failed, target_argmax)

    @lazy_property
    def features(self) -> Tensor | None:
        """Hidden states of the target at the paths, [B, P, F], padded to the longest; None without any."""
        return None if self.path_features is None else self.path_features.gather()

    def copy(self) -> "Commit":
        """Return the same commit with new lists; tensors are shared."""
        paths, tokens = [list(row) for row in self.paths], [list(row) for row in self.tokens]
        argmax = self.target_argmax and TargetArgmax(self.target_argmax.tree.copy(), list(self.target_argmax.tokens))
        found = self.target_candidates and TargetCandidates(
            self.target_candidates.tree.copy(), tuple(self.target_candidates.rows)
        )
        return Commit(paths, tokens, self.path_features, self.failed, argmax, found)

    def with_target_outputs(
        self,
        features: PathFeatures | None,
        target_argmax: TargetArgmax | None,
        target_candidates: TargetCandidates | None = None,
    ) -> "Commit":
        """Return the same commit with the outputs of the target that drafters read."""
        return Commit(self.paths, self.tokens, features, self.failed, target_argmax, target_candidates)

    @lazy_property
    def counts(self) -> list[int]:
        """Return the number of KV entries that stay, which is also the number of tokens, as [B].

        At least 1 unless the request failed.
        """
        return list(map(len, self.tokens))

    def truncate(self, counts: Sequence[int]) -> "Commit":
        """Return the commit with only the first counts[b] entries of request b."""
        paths = [row[:n] for row, n in zip(self.paths, counts, strict=True)]
        tokens = [row[:n] for row, n in zip(self.tokens, counts, strict=True)]
        features = None if self.path_features is None else self.path_features.truncate(counts)
        return Commit(paths, tokens, features, self.failed, self.target_argmax, self.target_candidates)
