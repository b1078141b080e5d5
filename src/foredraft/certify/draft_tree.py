"""A verified draft tree of one request, with the probability that its drafter sampled it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from foredraft.tree import SampledSiblings, TokenTree
from foredraft.verification.probs import Probs

Shape = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Siblings:
    """Children of one node that one drafter sampled from one distribution."""

    q: Probs
    children: tuple[int, ...]  # nodes in the order of sampling
    is_independent: bool  # sampled with replacement; equal samples are one node, which comes once for each

    def compute_probability(self, tokens: Sequence[int]) -> float:
        """Compute the probability of these samples.

        Args:
            tokens: token ids of all nodes.
        """
        probability, left = 1.0, self.q.total
        for child in self.children:
            mass = self.q[tokens[child]]
            if left <= 0:
                return 0.0
            probability *= mass / left
            left -= 0.0 if self.is_independent else mass
        return probability


@dataclass(frozen=True)
class DraftTree:
    """Draft tree below the last committed token, which is node 0."""

    tokens: tuple[int, ...]  # N
    parents: tuple[int, ...]  # N
    sampled: Mapping[int, Siblings]  # parent -> leading children that were sampled from its row of q
    further: Mapping[int, tuple[Siblings, ...]] = field(default_factory=dict)  # parent -> samples of further drafters

    @classmethod
    def from_tree(cls, tree: TokenTree, b: int) -> "DraftTree":
        """Read the tree of request b of a step."""
        root = tree.roots[b]
        sampled: dict[int, Siblings] = {}
        for node in range(root, tree.sizes[b]):
            row = tree.get_row(b, node)
            children = [child - root for child in tree.children[b][node]]
            if tree.num_sampled_children is not None:
                children = children[: tree.num_sampled_children[row]]
            q = to_probs(tree.q[row]) if children and tree.q is not None else None
            if q is not None and len(q.mass) > 1:  # a token of probability 1 is not sampled, whichever drafter chose it
                sampled[node - root] = Siblings(q, tuple(children), False)
        further = {
            parent: tuple(_read_further(group) for group in groups)
            for (owner, parent), groups in (tree.further_samples or {}).items()
            if owner == b
        }
        parents = (-1, *(parent - root for parent in tree.parents[b][root + 1 :]))
        return cls(tuple(tree.tokens[b][root:]), parents, sampled, further)

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of this tree among those of the same drafter after the same tokens."""
        shape = tuple((parent, siblings.children) for parent, siblings in self.sampled.items())
        more = tuple((parent, tuple(group.children for group in groups)) for parent, groups in self.further.items())
        return self.tokens, self.parents, shape, more

    @property
    def group_key(self) -> tuple[object, ...]:
        """Identity of the part that is decided before anything is sampled.

        Trees with one key are outcomes of one experiment; a tree without samples is the only one.
        """
        if not self.sampled and not self.further:
            return self.key
        first = self.sampled.get(0)
        num_sampled = 0 if first is None else len(first.children)
        below_root = [node for node, parent in enumerate(self.parents) if parent == 0]
        deterministic = tuple(self.tokens[node] for node in below_root[num_sampled:]) if not self.further else ()
        return num_sampled, deterministic, tuple(len(group.children) for group in self.further.get(0, ()))

    @property
    def probability(self) -> float:
        """Probability of the samples of this tree, by the distributions that the drafter states."""
        result = 1.0
        for siblings in self._iterate_siblings():
            result *= siblings.compute_probability(self.tokens)
        return result

    def collect_path(self, node: int) -> tuple[int, ...]:
        """Return the draft tokens from the root (excluded) to a node (included)."""
        path: list[int] = []
        while node > 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return tuple(path[::-1])

    def list_tokens(self) -> set[int]:
        """List the tokens of the tree and of the supports of its distributions."""
        result = set(self.tokens)
        for siblings in self._iterate_siblings():
            ids = np.flatnonzero(siblings.q.gather(None)) if siblings.q.ids is None else siblings.q.ids
            result |= set(map(int, ids))
        return result

    def repeat(self, count: int, ids: Sequence[int]) -> TokenTree:
        """Return this tree `count` times, over a vocabulary that holds only these token ids, in this order."""
        index_of = {token: index for index, token in enumerate(ids)}
        tokens, columns = [index_of[token] for token in self.tokens], np.array(ids)
        q, num_sampled = np.zeros((len(tokens), len(ids))), [0] * len(tokens)
        for parent, siblings in self.sampled.items():
            q[parent], num_sampled[parent] = siblings.q.gather(columns), len(siblings.children)
        further = {
            (b, parent): tuple(
                SampledSiblings(torch.from_numpy(group.q.gather(columns)), group.children, group.is_independent)
                for group in groups
            )
            for parent, groups in self.further.items()
            for b in range(count)
        }
        return TokenTree(
            [tokens] * count,
            [list(self.parents)] * count,
            torch.from_numpy(q).repeat(count, 1) if self.sampled else None,
            num_sampled_children=tuple(num_sampled * count),
            further_samples=further or None,
        )

    def _iterate_siblings(self) -> Iterator[Siblings]:
        yield from self.sampled.values()
        for groups in self.further.values():
            yield from groups


def _read_further(group: SampledSiblings) -> Siblings:
    q = to_probs(group.q)
    if q is None:
        raise ValueError("samples have no distribution")
    return Siblings(q, group.children, group.is_independent)


def to_probs(row: torch.Tensor) -> Probs | None:
    """Return the masses of a row [V] that are not 0, as they are; None if there are none."""
    values = row.detach().cpu().double().numpy()
    ids = np.flatnonzero(values)
    return Probs(values[ids], len(values), ids) if len(ids) else None
