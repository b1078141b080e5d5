"""Draft of one request, and its conversion to the token tree of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.request import Batch, Request
from foredraft.sampling import rng
from foredraft.sampling.rng import NoiseStream
from foredraft.tree import TokenTree


@dataclass(frozen=True)
class Draft:
    """Draft nodes of one request below its root.

    Node n is tokens[n - 1]; node 0 is the root, which is the last committed token. parents[n - 1] < n.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: Tensor | None = None  # [1 + len(tokens), V] distribution sampled from after each node; None = deterministic

    @classmethod
    def from_chain(cls, tokens: Sequence[int], q: Tensor | None = None) -> "Draft":
        """Make a chain: every node is the child of the one before."""
        return cls(tuple(tokens), tuple(range(len(tokens))), q)

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]], budget: int) -> "Draft":
        """Merge continuations into a tree of at most `budget` nodes. Common prefixes share nodes; earlier paths win."""
        tokens: list[int] = []
        parents: list[int] = []
        index: dict[tuple[int, int], int] = {}
        for path in paths:
            node = 0
            for token in path:
                child = index.get((node, token))
                if child is None:
                    if len(tokens) == budget:
                        break
                    tokens.append(token)
                    parents.append(node)
                    child = index[node, token] = len(tokens)
                node = child
        return cls(tuple(tokens), tuple(parents))

    def limit_depth(self, depth: int) -> "Draft":
        """Drop the nodes deeper than `depth`."""
        if len(self.tokens) <= depth:  # a tree of n nodes has depth n at most
            return self
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        if max(depths) <= depth:
            return self
        nodes = [node for node, d in enumerate(depths) if d <= depth]
        index = {node: i for i, node in enumerate(nodes)}
        return Draft(
            tuple(self.tokens[node - 1] for node in nodes[1:]),
            tuple(index[self.parents[node - 1]] for node in nodes[1:]),
            None if self.q is None else self.q[nodes],
        )


def to_token_tree(batch: Batch, drafts: Mapping[int, Draft]) -> TokenTree:
    """Build the token tree of a batch from drafts by batch index.

    A draft is cut to `Request.max_draft_depth`. A request without a draft has its root alone. The tree has q if any
    draft has one; rows of zeros mark deterministic draft tokens.
    """
    empty = Draft()
    every = [drafts.get(b, empty).limit_depth(request.max_draft_depth) for b, request in enumerate(batch.requests)]
    tokens = [[batch.get_root_token(b), *draft.tokens] for b, draft in enumerate(every)]
    parents = [[-1, *draft.parents] for draft in every]
    return TokenTree.from_lists(tokens, parents, _stack_q(batch, every))


def root_tree(batch: Batch) -> TokenTree:
    """Build the tree of a batch in which no request has a draft."""
    return TokenTree([[batch.get_root_token(b)] for b in range(len(batch))], [[-1] for _ in batch.requests])


def _stack_q(batch: Batch, drafts: Sequence[Draft]) -> Tensor | None:
    given = [draft.q for draft in drafts if draft.q is not None]
    if not given:
        return None
    zeros = given[0].new_zeros(1, given[0].shape[-1])
    scored = [draft for draft, is_scored in zip(drafts, batch.needs_logits, strict=True) if is_scored]
    return torch.cat([zeros.expand(1 + len(d.tokens), -1) if d.q is None else d.q for d in scored])


def draft_noise_key(request: Request, node: int, depth: int) -> int:
    """Return the noise key for sampling the children of a draft node.

    Under `match` it is the key that the target samples this position with, so both choose the same token if p and
    q agree. Under the other rules the key depends on where the step began, so no later step
    reuses the noise of a rejected draft.

    Args:
        request: the request; its seed and sample index enter the key.
        node: index of the node in the draft; 0 = the root.
        depth: depth of the node; 0 = the root.
    """
    position = request.num_tokens - 1
    if request.verify == "match":
        return rng.derive_key(request.seed, request.sample_index, NoiseStream.TOKEN, position + depth + 1)
    return rng.derive_key(request.seed, request.sample_index, NoiseStream.DRAFT, position, node)
