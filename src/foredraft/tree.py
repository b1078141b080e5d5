"""Token trees and what a verification keeps of them. Pure data: no model, no randomness."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import index, sub
from typing import Generic, TypeVar, overload

import torch
from torch import Tensor

T = TypeVar("T")


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """[B, N] int64 of ragged rows, -1 where a row has ended."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows], dtype=torch.int64).view(len(rows), width)


def unpad(rows: Tensor) -> list[list[int]]:
    """The ragged rows behind `pad`."""
    return [[x for x in row if x >= 0] for row in rows.tolist()]


class lazy(Generic[T]):  # noqa: N801 - a decorator
    """functools.cached_property without its lock, which until Python 3.12 costs more than most of what is below."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> "lazy[T]": ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> "lazy[T] | T":
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._make(instance)
        return value


class Padded:
    """A field of ragged rows, given as lists or as a padded tensor. It reads as the tensor, made when first asked for:
    a step looks at its few nodes as lists, and every small tensor costs it microseconds."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._tensor, self._rows = f"_{name}_tensor", f"_{name}_rows"

    def __get__(self, instance: object | None, owner: type | None = None) -> Tensor:
        if instance is None:
            raise AttributeError("a field without a default")
        tensor: Tensor | None = instance.__dict__.get(self._tensor)
        if tensor is None:
            tensor = instance.__dict__[self._tensor] = pad(instance.__dict__[self._rows])
        return tensor

    def __set__(self, instance: object, value: Tensor | list[list[int]]) -> None:
        instance.__dict__[self._rows if isinstance(value, list) else self._tensor] = value

    def rows(self, instance: object) -> list[list[int]] | None:
        """The lists, if it was given as such."""
        return instance.__dict__.get(self._rows)


_TOKENS, _PARENTS, _PATH, _FOLLOWING = Padded(), Padded(), Padded(), Padded()


@dataclass(frozen=True)
class TokenTree:
    """What one target pass verifies for each request.

    The leading `known` nodes are committed tokens whose successor is committed too (a prompt chunk, or what a
    preempted request recomputes). The node after them is the last committed token; everything below it is drafted.
    """

    tokens: Padded = _TOKENS  # [B, N] int64, -1 = no node
    parents: Padded = _PARENTS  # [B, N] int64, parents[:, 0] == -1, otherwise parents[b, n] < n; -1 = no node
    q: Tensor | None = None  # [R, V] by row; children of a node were drawn, in order, without replacement from its row
    known: tuple[tuple[int, ...], ...] | None = None  # B lists: the successors of the leading nodes
    drawn: tuple[int, ...] | None = None  # R: first children that were drawn from q, the others are guesses; None = all
    predicted: frozenset[int] = frozenset()  # requests whose draft is copied from their prediction

    @classmethod
    def of(
        cls, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], q: Tensor | None = None
    ) -> "TokenTree":
        """From ragged lists: B lists of token ids, B lists of parent indices."""
        return cls([list(map(index, row)) for row in tokens], [list(map(index, row)) for row in parents], q)

    @classmethod
    def chains(cls, tokens: Sequence[Sequence[int]], q: Tensor | None = None) -> "TokenTree":
        """Every request's tokens in a line: the last committed token, then the draft."""
        return cls.of(tokens, [range(-1, len(row) - 1) for row in tokens], q)

    def copied(self) -> "TokenTree":
        """The same tree in lists of its own; q is shared."""
        tokens, parents = [list(row) for row in self.token_lists], [list(row) for row in self.parent_lists]
        drawn = None if self.drawn is None else tuple(self.drawn)
        return TokenTree(tokens, parents, self.q, self.known, drawn, frozenset(self.predicted))

    @lazy
    def sizes(self) -> list[int]:
        """B numbers of nodes."""
        return list(map(len, self.token_lists))

    @lazy
    def token_lists(self) -> list[list[int]]:
        rows = _TOKENS.rows(self)
        return unpad(self.tokens) if rows is None else rows

    @lazy
    def parent_lists(self) -> list[list[int]]:
        rows = _PARENTS.rows(self)
        if rows is not None:
            return rows
        return [row[:size] for row, size in zip(self.parents.tolist(), self.sizes, strict=True)]

    @lazy
    def roots(self) -> list[int]:
        """B indices of the last committed token; equal to the size where the successor of every node is known."""
        return [len(known) for known in self.known] if self.known else [0] * len(self.sizes)

    @lazy
    def children(self) -> list[list[list[int]]]:
        """[b][n] -> the drafted children of a node, in the order they were drawn."""
        result = []
        for parents, root in zip(self.parent_lists, self.roots, strict=True):
            below: list[list[int]] = [[] for _ in parents]
            for node in range(root + 1, len(parents)):
                below[parents[node]].append(node)
            result.append(below)
        return result

    @lazy
    def depths(self) -> list[list[int]]:
        """[b][n] -> distance from node 0."""
        result = []
        for parents in self.parent_lists:
            depth: list[int] = []
            for parent in parents:
                depth.append(depth[parent] + 1 if parent >= 0 else 0)
            result.append(depth)
        return result

    @lazy
    def first_rows(self) -> list[int]:
        """B + 1 offsets: the rows of p and q of request b are [first_rows[b], first_rows[b + 1])."""
        return [0, *accumulate(map(sub, self.sizes, self.roots))]

    def row(self, b: int, node: int) -> int:
        """The row of p and q that follows a scored node."""
        return self.first_rows[b] + node - self.roots[b]

    def place(self, row: int) -> tuple[int, int]:
        """The request and the node a row of p and q follows: the inverse of `row`."""
        b = bisect_right(self.first_rows, row) - 1
        return b, row - self.first_rows[b] + self.roots[b]

    @lazy
    def is_chain(self) -> bool:
        return all(parents == list(range(-1, len(parents) - 1)) for parents in self.parent_lists)

    def ancestors(self, b: int) -> Tensor:
        """[N, N] bool: node j is node i or stands above it."""
        parents = self.parent_lists[b]
        mask = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def path(self, b: int, node: int) -> list[int]:
        """The drafted tokens from below the root down to a node, that node included."""
        tokens, parents, root = self.token_lists[b], self.parent_lists[b], self.roots[b]
        result = []
        while node > root:
            result.append(tokens[node])
            node = parents[node]
        return result[::-1]

    def select(self, requests: Sequence[int]) -> "TokenTree":
        """The trees of some requests, in that order."""
        mine = list(requests)
        q = None if self.q is None else torch.cat([self.q[slice(*self.first_rows[b : b + 2])] for b in mine])
        known = None if self.known is None else tuple(self.known[b] for b in mine)
        drawn = None
        if self.drawn is not None:
            drawn = tuple(count for b in mine for count in self.drawn[slice(*self.first_rows[b : b + 2])])
        predicted = frozenset(i for i, b in enumerate(mine) if b in self.predicted)
        tokens, parents = [self.token_lists[b] for b in mine], [self.parent_lists[b] for b in mine]
        return TokenTree(tokens, parents, q, known, drawn, predicted)

    def after(self, prefixes: Sequence[Sequence[int]], known: Sequence[Sequence[int]]) -> "TokenTree":
        """The tree with B runs of committed tokens put before its roots; a root whose successor is known is a leaf."""
        tokens, parents = [], []
        for prefix, old, links in zip(prefixes, self.token_lists, self.parent_lists, strict=True):
            shift = len(prefix)
            tokens.append([*prefix, *old])
            parents.append([*range(-1, shift), *[link + shift for link in links[1:]]])
        return TokenTree(tokens, parents, self.q, tuple(tuple(row) for row in known), self.drawn, self.predicted)


@dataclass(frozen=True)
class Answers:
    """The target's likeliest token after every scored node of a pass, whether the node survived or not.

    For drafters with `wants_answers`. They are looked up by path, so that they hold for whatever tree was verified:
    one of another drafter, or one that several were merged into.
    """

    tree: TokenTree
    tokens: Sequence[int]  # R

    def after(self, b: int, path: Sequence[int]) -> int | None:
        """The answer to a drafted path below a request's root; None where the pass has no such node, or no law."""
        tree, drafted = self.tree, self.tree.token_lists[b]
        nodes = [tree.roots[b]] if tree.roots[b] < tree.sizes[b] else []
        for token in path:  # equal siblings may be there: what is below them is below the same text
            nodes = [child for node in nodes for child in tree.children[b][node] if drafted[child] == token]
        answer = self.tokens[tree.row(b, nodes[0])] if nodes else -1
        return answer if answer >= 0 else None


@dataclass(frozen=True)
class Commit:
    """What survives of a tree: per request a path of nodes, each with the token that follows it."""

    path: Padded = _PATH  # [B, P] int64 surviving nodes, node 0 first; -1 pads
    tokens: Padded = _FOLLOWING  # [B, P] int64 tokens[:, i] follows node path[:, i]; -1 pads
    choice: Tensor | None = None  # [R] int64 the target's own draw after a scored node; -1 where the rule made none
    features: Tensor | None = None  # [B, P, F] target states at the path
    failed: frozenset[int] = frozenset()  # requests whose law was not finite: nothing of theirs is committed
    answers: Answers | None = None  # for drafters that want them

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], **more: object) -> "Commit":
        """From ragged lists of equal lengths."""
        return cls(list(map(list, paths)), list(map(list, tokens)), **more)  # type: ignore[arg-type]

    def copied(self) -> "Commit":
        """The same in lists of its own; tensors are shared."""
        paths, tokens = [list(row) for row in self.path_lists], [list(row) for row in self.token_lists]
        answers = self.answers and Answers(self.answers.tree.copied(), list(self.answers.tokens))
        return Commit(paths, tokens, self.choice, self.features, self.failed, answers)

    def shown(self, features: Tensor | None, answers: Answers | None) -> "Commit":
        """The same with what drafters see of it."""
        return Commit(self.path_lists, self.token_lists, self.choice, features, self.failed, answers)

    @lazy
    def counts(self) -> list[int]:
        """B numbers of KV entries kept, and of tokens that follow them; at least one unless the request failed."""
        return list(map(len, self.token_lists))

    @lazy
    def count(self) -> Tensor:
        """[B] int64: the counts."""
        return torch.tensor(self.counts, dtype=torch.int64)

    @lazy
    def path_lists(self) -> list[list[int]]:
        rows = _PATH.rows(self)
        return unpad(self.path) if rows is None else rows

    @lazy
    def token_lists(self) -> list[list[int]]:
        rows = _FOLLOWING.rows(self)
        return unpad(self.tokens) if rows is None else rows

    def cut(self, counts: Sequence[int]) -> "Commit":
        """Only the first counts[b] entries of every request."""
        paths = [row[:n] for row, n in zip(self.path_lists, counts, strict=True)]
        tokens = [row[:n] for row, n in zip(self.token_lists, counts, strict=True)]
        width = max(counts, default=0)
        features = None if self.features is None else self.features[:, :width]
        return Commit(paths, tokens, self.choice, features, self.failed, self.answers)
