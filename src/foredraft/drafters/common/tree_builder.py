"""Growing draft: a chain, a static tree, or the dynamic tree of EAGLE-2 (2406.16858).

A drafter computes logits after the frontier nodes of each `TreeBuilder` and passes them to `tree_level.add_level`,
which chooses the children. This file chooses the next frontier and the nodes to verify, in the same way for every
method. It runs no network.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foredraft.drafters.common.static_tree import StaticTree
from foredraft.drafters.draft import Draft
from foredraft.errors import ForedraftError
from foredraft.request import Request
from foredraft.tree import SampledSiblings

MAX_TREE_NODES = 2048  # nodes of a draft; larger options are rejected as mistakes, as they would exhaust memory
MAX_TREE_WIDTH = 256  # children per node
DEFAULT_TREE_NODES = 16  # nodes if only `top_k` is given
DEFAULT_TREE_WIDTH = 4  # children per node if only `tree_nodes` is given
MIN_PROBABILITY = 1e-300  # floor before a logarithm

ScoredChild = tuple[int, float]  # token, and log-probability that it is accepted if its parent is


@dataclass(frozen=True)
class TreeSpec:
    """Limits and shape of a draft.

    Without a `static_tree` the tree is dynamic: each level expands the `width` likeliest nodes of the level above to
    `width` children each, and the `max_nodes` likeliest of all nodes are verified. Width 1 is a chain. In the notation
    of EAGLE-2, total_tokens = max_nodes + 1 and depth = max_depth - 1.
    """

    max_depth: int  # levels below the root
    max_nodes: int  # verified nodes below the root
    width: int = 1  # children per node, and expanded nodes per level
    static_tree: StaticTree | None = None  # fixed shape; None = dynamic tree or chain
    num_paths: int | None = None  # verify only this many of the likeliest root-to-leaf paths of the shape; None = all
    min_confidence: float = 0.0  # stop below nodes whose path probability is less than this

    @classmethod
    def from_options(
        cls,
        num_speculative_tokens: int,
        tree_nodes: int | None = None,
        top_k: int | None = None,
        branching: Sequence[int] | None = None,
        min_confidence: float = 0.0,
        num_drafts: int | None = None,
    ) -> "TreeSpec":
        """Make the spec of a method's options; their meaning is in `TreeOptions`.

        Raises:
            ForedraftError: for options that describe no tree.
        """
        if not 0 <= min_confidence < 1:
            raise ForedraftError(f"min_confidence must lie in 0..1, got {min_confidence}")
        if num_drafts is not None:
            if (tree_nodes, top_k, branching) != (None, None, None):
                raise ForedraftError("num_drafts is a tree of chains; give it without tree_nodes, top_k and branching")
            if not 1 <= num_drafts <= MAX_TREE_WIDTH:
                raise ForedraftError(f"num_drafts must be positive and at most {MAX_TREE_WIDTH}, got {num_drafts}")
            if num_drafts > 1 and num_speculative_tokens > 0:
                branching = (num_drafts, *[1] * (num_speculative_tokens - 1))
        if branching is not None:
            if tree_nodes is not None or top_k is not None:
                raise ForedraftError("branching fixes the whole tree; give it without tree_nodes and top_k")
            if not branching or min(branching) < 1:
                raise ForedraftError(f"branching takes positive numbers of children by depth, got {tuple(branching)}")
            size = sum(itertools.accumulate(branching, operator.mul))
            if size > MAX_TREE_NODES:
                raise ForedraftError(
                    f"branching {tuple(branching)} is {size} nodes; a draft takes {MAX_TREE_NODES} at most"
                )
            return cls.from_static_tree(StaticTree.from_branching(branching), min_confidence)
        if tree_nodes is None and top_k is None:
            return cls(num_speculative_tokens, num_speculative_tokens, min_confidence=min_confidence)
        nodes = DEFAULT_TREE_NODES if tree_nodes is None else tree_nodes
        width = min(DEFAULT_TREE_WIDTH, nodes) if top_k is None else top_k
        if not 1 <= nodes <= MAX_TREE_NODES:
            raise ForedraftError(f"tree_nodes must be positive and at most {MAX_TREE_NODES}, got {nodes}")
        if not 1 <= width <= MAX_TREE_WIDTH:
            raise ForedraftError(f"top_k must be positive and at most {MAX_TREE_WIDTH}, got {width}")
        return cls(num_speculative_tokens, nodes, width, min_confidence=min_confidence)

    @classmethod
    def from_static_tree(cls, static_tree: StaticTree, min_confidence: float = 0.0) -> "TreeSpec":
        return cls(static_tree.depth, len(static_tree), static_tree.width, static_tree, min_confidence=min_confidence)

    def with_whole_paths(self, count: int) -> "TreeSpec":
        """Verify only the `count` likeliest root-to-leaf paths of the static tree, which is drafted whole."""
        return replace(self, num_paths=count, max_nodes=min(self.max_nodes, count * self.max_depth))

    def restrict(self, depth: int, budget: int, is_chain: bool) -> "TreeSpec":
        """Cut the spec to `depth` levels and `budget` nodes; to a chain if `is_chain` (a rule that takes no trees)."""
        depth = min(depth, self.max_depth)
        if is_chain or self.is_chain:
            depth = min(depth, budget)
            return TreeSpec(depth, depth, min_confidence=self.min_confidence)
        if self.static_tree is None:
            return replace(self, max_depth=depth, max_nodes=min(self.max_nodes, budget))
        if self.num_paths is not None:
            spec = TreeSpec.from_static_tree(
                self.static_tree.restrict(min(depth, budget), len(self.static_tree)), self.min_confidence
            )
            spec = spec.with_whole_paths(self.num_paths)
            return replace(spec, max_nodes=min(spec.max_nodes, budget))
        return TreeSpec.from_static_tree(self.static_tree.restrict(depth, budget), self.min_confidence)

    @property
    def is_chain(self) -> bool:
        return self.width == 1 and self.static_tree is None

    @property
    def num_levels(self) -> int:
        """Largest number of levels that a draft can have: a tree of n nodes has n at most."""
        return min(self.max_depth, self.max_nodes)

    @property
    def is_static(self) -> bool:
        """Whether the shape is independent of the sampled tokens: a chain or a static tree."""
        return self.width == 1 or self.static_tree is not None


@dataclass(frozen=True)
class TreeOptions:
    """Tree options that several methods share. Without any, the draft is a chain of num_speculative_tokens.

    Args:
        tree_nodes: verified nodes of a dynamic tree (EAGLE-2) of depth num_speculative_tokens; default 16.
        top_k: children per node and expanded nodes per level of the dynamic tree; default min(4, tree_nodes).
        branching: children of every node by depth; fixes the shape, excludes `tree_nodes` and `top_k`.
        min_confidence: path probability in [0, 1) below which a draft stops; 0 = never.
        num_drafts: number of chains of num_speculative_tokens, which part at the root; excludes the other trees.
    """

    tree_nodes: int | None = None
    top_k: int | None = None
    branching: tuple[int, ...] | None = None
    min_confidence: float = 0.0
    num_drafts: int | None = None

    @property
    def has_tree(self) -> bool:
        return (self.tree_nodes, self.top_k, self.branching) != (None, None, None) or (self.num_drafts or 1) > 1

    def to_tree_spec(self, num_speculative_tokens: int) -> TreeSpec:
        return TreeSpec.from_options(
            num_speculative_tokens,
            self.tree_nodes,
            self.top_k,
            self.branching,
            self.min_confidence,
            self.num_drafts,
        )


@dataclass(frozen=True)
class NodeLogits:
    """Logits after R nodes over the W tokens of a drafter, which may be fewer than the target's V."""

    logits: Tensor  # [R, W]
    vocab_size: int  # V
    token_ids: Tensor | None = None  # [W] int64 token id of each column, ascending; None = 0..W-1

    def to_full_vocab(self) -> Tensor:
        """Return logits [R, V], with -inf for tokens outside the drafter's vocabulary."""
        if self.token_ids is None and self.logits.shape[-1] == self.vocab_size:
            return self.logits
        every = self.logits.new_full((len(self.logits), self.vocab_size), -torch.inf)
        every[:, slice(self.logits.shape[-1]) if self.token_ids is None else self.token_ids] = self.logits
        return every

    def to_token_ids(self, columns: list[list[int]]) -> list[list[int]]:
        """Map columns of the logits to token ids."""
        return columns if self.token_ids is None else self.token_ids[torch.tensor(columns)].tolist()


@dataclass
class TreeBuilder:
    """Growing draft of one request. Node 0 is the root.

    Each call of `add_level` adds the children of `frontier`. Growth ends when `frontier` is empty.
    """

    request: Request
    tree_spec: TreeSpec
    tokens: list[int] = field(default_factory=list)  # [i] is node i + 1
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=lambda: [0])
    log_probs: list[float] = field(default_factory=lambda: [0.0])  # of the path from the root to a node
    draft_probs: dict[int, Tensor] = field(default_factory=dict)  # node -> q [V] its children were sampled from
    frontier: list[int] = field(default_factory=lambda: [0])  # nodes to expand next
    best_nodes: list[int] = field(default_factory=list)  # if `prunes_nodes`: the likeliest nodes so far
    # node -> nodes of the static tree that it stands for, if there is one; several if equal samples share the node
    static_index: list[tuple[int, ...]] = field(default_factory=lambda: [(0,)])
    draft_stream: int = 0  # of the batch
    sampled_children: dict[int, tuple[int, ...]] = field(default_factory=dict)  # node -> child of each of its samples

    def __post_init__(self) -> None:
        # a sampled node must not be dropped, so whole paths cannot be selected afterwards: allocate nodes instead
        if self.uses_q and self.tree_spec.num_paths is not None:
            self.tree_spec = replace(self.tree_spec, static_tree=None, num_paths=None)

    @property
    def is_greedy(self) -> bool:
        return self.request.spec.sampling.is_greedy

    @property
    def uses_q(self) -> bool:
        """Whether children are sampled from a q that the verification rule uses."""
        return not self.is_greedy and self.request.spec.rule.uses_q

    @property
    def samples_independently(self) -> bool:
        """Whether children are sampled with replacement; equal samples share a node."""
        return self.uses_q and self.request.spec.rule.samples_independently and self.tree_spec.static_tree is not None

    @property
    def prunes_nodes(self) -> bool:
        """Whether only the likeliest nodes are verified. Sampled nodes and static trees are verified whole."""
        return not self.uses_q and not self.tree_spec.is_static

    @property
    def shares_noise(self) -> bool:
        """Whether draft and target sample a position with the same noise."""
        return not self.is_greedy and self.request.spec.rule.shares_noise

    def collect_path(self, node: int) -> list[int]:
        """Return the tokens from below the root down to a node."""
        result = []
        while node:
            result.append(self.tokens[node - 1])
            node = self.parents[node - 1]
        return result[::-1]

    def num_children(self, node: int) -> int:
        """Return the number of children to give a node, or of samples if children are sampled with replacement."""
        return self.tree_spec.width if self.tree_spec.static_tree is None else len(self._list_static_children(node))

    def num_races(self, node: int) -> int:
        """Return the number of races that select the children of a node: one for all, or one for each sample."""
        return self.num_children(node) if self.samples_independently else 1

    def _list_static_children(self, node: int) -> list[int]:
        """Return the nodes of the static tree below a node, in the order of its samples; none without a static tree."""
        static_tree = self.tree_spec.static_tree
        if static_tree is None:
            return []
        return [child for parent in self.static_index[node] for child in static_tree.children[parent]]

    def allocate_children(self, top_probs: Sequence[Sequence[float]]) -> list[int]:
        """Choose how many children to sample below every frontier node, before any is sampled.

        A tree that dropped sampled tokens by their probability would not have the stated q. The remaining nodes are
        spread over the remaining levels; upper levels get more.

        Args:
            top_probs: largest probabilities of q after each frontier node, descending.
        """
        levels = self.tree_spec.max_depth - self.depths[self.frontier[0]]
        nodes_left = self.tree_spec.max_nodes - len(self.tokens)
        scores = [
            (self.log_probs[node] + math.log(max(q, MIN_PROBABILITY)), -i)
            for i, (node, top) in enumerate(zip(self.frontier, top_probs, strict=True))
            for q in top[: self.tree_spec.width]
        ]
        best = sorted(scores, reverse=True)[: -(-2 * nodes_left // (levels + 1))]
        return [sum(-order == i for _, order in best[:nodes_left]) for i in range(len(self.frontier))]

    def add_children(self, children: Sequence[Sequence[ScoredChild]]) -> None:
        """Add the children of every frontier node, in the order of the frontier, and choose the next frontier."""
        first = len(self.depths)
        for node, scored in zip(self.frontier, children, strict=True):
            child_by_token: dict[int, int] = {}
            samples = [self._add_child(node, child, child_by_token) for child in scored]
            for child, static_child in zip(samples, self._list_static_children(node), strict=False):
                self.static_index[child] += (static_child,)
            if self.samples_independently:
                self.sampled_children[node] = tuple(samples)
        new_nodes = list(range(first, len(self.depths)))
        if self.prunes_nodes:
            candidates = [*self.best_nodes, *new_nodes]
            self.best_nodes = sorted(candidates, key=lambda node: (-self.log_probs[node], node))[
                : self.tree_spec.max_nodes
            ]
        self.frontier = self._select_frontier(new_nodes)

    def _add_child(self, node: int, scored: ScoredChild, child_by_token: dict[int, int]) -> int:
        """Add a child of a node, or return the one that has its token already."""
        token, log_prob = scored
        child = child_by_token.setdefault(token, len(self.depths))
        if child == len(self.depths):
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
            self.log_probs.append(self.log_probs[node] + log_prob)
            self.static_index.append(())
        return child

    def _select_frontier(self, nodes: list[int]) -> list[int]:
        """Choose which of the newest nodes to expand; no end-of-sequence token, no path below `min_confidence`."""
        if not nodes or self.depths[nodes[0]] >= self.tree_spec.max_depth:
            return []
        end_ids, min_confidence = self.request.spec.end_ids, self.tree_spec.min_confidence
        threshold = math.log(min_confidence) if min_confidence > 0 else -math.inf
        if self.uses_q:  # a cut may depend on q above it, never on the tokens sampled from that q
            # without a threshold q is not read: on a GPU it would be a wait for every level
            is_confident = min_confidence == 0 or self._compute_log_confidence(nodes[0]) >= threshold
            nodes = nodes if is_confident else []
        else:
            nodes = [node for node in nodes if self.log_probs[node] >= threshold]
        nodes = [node for node in nodes if self.tokens[node - 1] not in end_ids]
        if self.tree_spec.static_tree is not None:
            return [node for node in nodes if self.num_children(node) > 0]
        if self.uses_q and len(self.tokens) >= self.tree_spec.max_nodes:  # the budget is used up
            return []
        if self.prunes_nodes:  # a child ranks behind its parent, so children of the last best node are never verified
            alive = set(self.best_nodes[: self.tree_spec.max_nodes - 1])
            nodes = [node for node in nodes if node in alive]
        return sorted(sorted(nodes, key=lambda node: -self.log_probs[node])[: self.tree_spec.width])

    def _compute_log_confidence(self, node: int) -> float:
        """Return the sum of log max q over the ancestors of a node."""
        total = 0.0
        while node:
            node = self.parents[node - 1]
            total += math.log(max(float(self.draft_probs[node].max()), MIN_PROBABILITY))
        return total

    @property
    def verified_nodes(self) -> list[int]:
        """Nodes to verify, ascending, the root first."""
        # a node is never likelier than its parent and has a larger index, so the best nodes include their ancestors
        if self.tree_spec.num_paths is not None:
            return self._select_whole_paths(self.tree_spec.num_paths)
        return [0, *sorted(self.best_nodes)] if self.prunes_nodes else list(range(len(self.depths)))

    def _select_whole_paths(self, count: int) -> list[int]:
        """Return the nodes of the `count` likeliest root-to-leaf paths; a path beyond `max_nodes` is skipped."""
        inner, selected = set(self.parents), {0}
        leaves = [node for node in range(1, len(self.depths)) if node not in inner]
        for leaf in sorted(leaves, key=lambda node: (-self.log_probs[node], node))[:count]:
            path, node = {leaf}, leaf
            while node:
                node = self.parents[node - 1]
                path.add(node)
            if len(selected | path) <= self.tree_spec.max_nodes + 1:
                selected |= path
        return sorted(selected)

    def to_draft(self) -> Draft:
        """Make the draft of the nodes to verify, with q if tokens were sampled."""
        if self.samples_independently:
            samples = {
                node: SampledSiblings(self.draft_probs[node], children, is_independent=True)
                for node, children in self.sampled_children.items()
                if children
            }
            return Draft(tuple(self.tokens), tuple(self.parents), samples=samples or None)
        if self.draft_probs:
            zeros = torch.zeros_like(next(iter(self.draft_probs.values())))
            q = torch.stack([self.draft_probs.get(node, zeros) for node in range(len(self.depths))])
            return Draft(tuple(self.tokens), tuple(self.parents), q)
        verified = self.verified_nodes
        if len(verified) == len(self.depths):
            return Draft(tuple(self.tokens), tuple(self.parents))
        index = {node: i for i, node in enumerate(verified)}
        tokens = tuple(self.tokens[node - 1] for node in verified[1:])
        return Draft(tokens, tuple(index[self.parents[node - 1]] for node in verified[1:]))
