"""Token recycling: the target's likeliest tokens after each token are kept, and later drafted as a tree.

It needs no draft model and no training. Candidates that the target computed for rejected nodes are used too.

Reference: 2408.08696.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from foredraft.drafters.draft import Draft
from foredraft.drafters.token_drafter import TokenDrafter
from foredraft.request import Batch, Request
from foredraft.tree import Commit

NO_TOKEN = -1  # entry of a row of the matrix that was not computed yet
FIRST_RANK_GAIN = 0.6  # assumed acceptance of the likeliest candidate; each later rank has half of the one before


@dataclass(frozen=True)
class Config:
    """Sizes of matrix and tree.

    Attributes:
        top_k: candidates kept per token of the vocabulary, 4 bytes each.
        nodes: most draft nodes per request and step.
    """

    top_k: int = 8
    nodes: int = 80


class CandidateMatrix:
    """The target's likeliest next tokens by token, of the newest pass that scored the token. All requests share it."""

    def __init__(self, vocab_size: int, top_k: int) -> None:
        self._rows: NDArray[np.int32] = np.full((vocab_size, min(top_k, vocab_size)), NO_TOKEN, np.int32)

    def write(self, token: int, candidates: Sequence[int]) -> None:
        """Replace the candidates after a token; surplus ones are dropped."""
        kept = candidates[: self._rows.shape[1]]
        self._rows[token, : len(kept)] = kept

    def look_up(self, token: int, rank: int) -> int:
        """Return the candidate of a rank after a token, `NO_TOKEN` without one."""
        return int(self._rows[token, rank]) if rank < self._rows.shape[1] else NO_TOKEN


@dataclass(frozen=True)
class RankNode:
    """Node of the fixed tree: its parent (0 = the root), its rank among the candidates, and its depth."""

    parent: int
    rank: int
    depth: int


def build_rank_tree(num_nodes: int, top_k: int, depth: int) -> tuple[RankNode, ...]:
    """Build the fixed tree, the nodes with the largest assumed acceptance first.

    A parent precedes its children, so that the first n nodes are the tree for a budget of n nodes.

    Args:
        num_nodes: most nodes without the root.
        top_k: most children of a node.
        depth: largest depth of a node.
    """
    nodes: list[RankNode] = []
    order = 0  # breaks ties, so that equal gains keep the order in which they were found
    heap = [(-FIRST_RANK_GAIN, order, RankNode(0, 0, 1))] if depth > 0 else []
    while heap and len(nodes) < num_nodes:
        gain, _, node = heapq.heappop(heap)
        nodes.append(node)
        if node.rank + 1 < top_k:
            order += 1
            heapq.heappush(heap, (gain / 2, order, replace(node, rank=node.rank + 1)))
        if node.depth < depth:
            order += 1
            heapq.heappush(heap, (gain * FIRST_RANK_GAIN, order, RankNode(len(nodes), 0, node.depth + 1)))
    return tuple(nodes)


@dataclass
class RecyclingState:
    """Committed tokens of one request."""

    tokens: list[int] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)


class TokenRecyclingDrafter(TokenDrafter[RecyclingState]):
    """Drafter of deterministic tokens, so verification is lossless for any matrix.

    A request whose rule takes chains alone gets the likeliest candidates in a chain.
    """

    def __init__(self, config: Config, num_speculative_tokens: int, vocab_size: int) -> None:
        self.matrix = CandidateMatrix(vocab_size, config.top_k)
        self._tree = build_rank_tree(config.nodes, config.top_k, num_speculative_tokens)
        self._chain = tuple(RankNode(i, 0, i + 1) for i in range(num_speculative_tokens))
        super().__init__(num_speculative_tokens, max(len(self._tree), 1))
        self.spec = replace(self.spec, num_target_candidates=config.top_k, token_steps="active")

    def new_state(self) -> RecyclingState:
        return RecyclingState()

    def draft_tokens(self, state: RecyclingState, request: Request, depth: int, budget: int) -> Draft:
        return self._draft_below(state.tokens[-1], request, depth, budget)

    def continue_tokens(
        self, state: RecyclingState, request: Request, path: Sequence[int], depth: int, budget: int
    ) -> Draft:
        return self._draft_below(path[-1], request, depth, budget)

    def observe(self, batch: Batch, commit: Commit) -> None:
        if commit.target_candidates is not None:
            for token, candidates in commit.target_candidates.list_scored():
                self.matrix.write(token, candidates)

    def _draft_below(self, token: int, request: Request, depth: int, budget: int) -> Draft:
        """Fill the fixed tree below a token. Nodes without a known candidate are left out with all below them."""
        shape = self._tree if request.spec.rule.takes_trees else self._chain
        filled = {0: 0}  # node of the fixed tree -> node of the draft
        tokens, parents = [token], [-1]
        for n, node in enumerate(shape, 1):
            if len(tokens) > budget:
                break
            if node.depth > depth or node.parent not in filled:
                continue
            candidate = self.matrix.look_up(tokens[filled[node.parent]], node.rank)
            if candidate != NO_TOKEN:
                filled[n] = len(tokens)
                parents.append(filled[node.parent])
                tokens.append(candidate)
        return Draft(tuple(tokens[1:]), tuple(parents[1:]))
