"""Growth of a draft level by level: a chain, a static tree, or the dynamic tree of EAGLE-2 (2406.16858).

A drafter computes logits after the frontier nodes of each `TreeBuilder` and passes them to `add_level`. This file
chooses the children, the next frontier and the nodes to verify, in the same way for every method. It runs no network.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foredraft.drafters.common.static_tree import StaticTree
from foredraft.drafters.draft import Draft, draft_noise_key
from foredraft.errors import ForedraftError
from foredraft.request import Request
from foredraft.sampling import rng
from foredraft.sampling.distribution import distribution
from foredraft.sampling.filters import argmax_tokens
from foredraft.sampling.params import Sampling

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
    ) -> "TreeSpec":
        """Make the spec of a method's options; their meaning is in `TreeOptions`.

        Raises:
            ForedraftError: for options that describe no tree.
        """
        if not 0 <= min_confidence < 1:
            raise ForedraftError(f"min_confidence must lie in 0..1, got {min_confidence}")
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
    """

    tree_nodes: int | None = None
    top_k: int | None = None
    branching: tuple[int, ...] | None = None
    min_confidence: float = 0.0

    @property
    def has_tree(self) -> bool:
        return (self.tree_nodes, self.top_k, self.branching) != (None, None, None)

    def to_tree_spec(self, num_speculative_tokens: int) -> TreeSpec:
        return TreeSpec.from_options(
            num_speculative_tokens, self.tree_nodes, self.top_k, self.branching, self.min_confidence
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
    static_index: list[int] = field(default_factory=lambda: [0])  # node -> node of the static tree, if there is one
    draft_stream: int = 0  # of the batch

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
        """Return the number of children to give a node."""
        static_tree = self.tree_spec.static_tree
        return self.tree_spec.width if static_tree is None else len(static_tree.children[self.static_index[node]])

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
        new_nodes = []
        for node, scored in zip(self.frontier, children, strict=True):
            if self.tree_spec.static_tree is not None:
                self.static_index += self.tree_spec.static_tree.children[self.static_index[node]][: len(scored)]
            for token, log_prob in scored:
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                self.log_probs.append(self.log_probs[node] + log_prob)
                new_nodes.append(len(self.tokens))
        if self.prunes_nodes:
            candidates = [*self.best_nodes, *new_nodes]
            self.best_nodes = sorted(candidates, key=lambda node: (-self.log_probs[node], node))[
                : self.tree_spec.max_nodes
            ]
        self.frontier = self._select_frontier(new_nodes)

    def _select_frontier(self, nodes: list[int]) -> list[int]:
        """Choose which of the newest nodes to expand; no end-of-sequence token, no path below `min_confidence`."""
        if not nodes or self.depths[nodes[0]] >= self.tree_spec.max_depth:
            return []
        end_ids, min_confidence = self.request.spec.end_ids, self.tree_spec.min_confidence
        threshold = math.log(min_confidence) if min_confidence > 0 else -math.inf
        if self.uses_q:  # a cut may depend on q above it, never on the tokens sampled from that q
            nodes = nodes if self._compute_log_confidence(nodes[0]) >= threshold else []
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


def add_level(builders: Sequence[TreeBuilder], node_logits: NodeLogits) -> None:
    """Add one level to every draft.

    Args:
        builders: growing drafts, each with a frontier.
        node_logits: logits after all frontier nodes, builder by builder.
    """
    nodes = [(g, node) for g in builders for node in g.frontier]
    if all(g.is_greedy and not g.request.spec.sampling.shapes_logits for g in builders):
        scored = _select_likeliest(nodes, node_logits)
    else:
        scored = _select_children(nodes, node_logits.to_full_vocab())
    children = iter(scored)
    for g in builders:
        g.add_children([next(children) for _ in g.frontier])


def _select_likeliest(nodes: Sequence[tuple[TreeBuilder, int]], node_logits: NodeLogits) -> list[list[ScoredChild]]:
    """Return the likeliest tokens after every node, without regard to sampling settings."""
    x = node_logits.logits.float() if node_logits.logits.dtype != torch.float64 else node_logits.logits
    # a chain without a confidence threshold needs no probabilities
    if all(g.tree_spec.width == 1 and not g.tree_spec.min_confidence for g, _ in nodes):
        best = argmax_tokens(x)
        ids = node_logits.to_token_ids([[max(column, 0)] for column in best])
        return [[(row[0], 0.0)] if column >= 0 else [] for row, column in zip(ids, best, strict=True)]
    widths = [g.num_children(node) for g, node in nodes]
    top = x.log_softmax(-1).topk(min(max(widths), x.shape[-1]), -1)  # measured at a third of the time of logsumexp
    log_probs, ids = top.values.tolist(), node_logits.to_token_ids(top.indices.tolist())
    return [_drop_impossible(row, values, width) for row, values, width in zip(ids, log_probs, widths, strict=True)]


def _select_children(nodes: Sequence[tuple[TreeBuilder, int]], logits: Tensor) -> list[list[ScoredChild]]:
    """Choose children from logits [R, V] under each request's sampling settings.

    They are sampled from q (`reject`, `block`), sampled with the target's noise (`match`), or the likeliest otherwise.
    """
    samplings = [_relax_greedy_sampling(g) for g, _ in nodes]
    history = None
    if any(s.shapes_logits for s in samplings):
        history = [g.request.build_history(g.collect_path(node)) for g, node in nodes]
    q = distribution(logits, samplings, history)
    scores = q
    if any(not g.is_greedy for g, _ in nodes):
        keys = [draft_noise_key(g.request, node, g.depths[node], g.draft_stream) for g, node in nodes]
        races = torch.tensor([g.uses_q or g.shares_noise for g, _ in nodes], device=q.device)
        scores = torch.where(races[:, None], rng.exponential_race(q, torch.tensor(keys, device=q.device)), q.double())
    widths = _allocate_widths(nodes, q)
    top = scores.topk(min(max(1, *widths), scores.shape[-1]), -1)
    log_probs = (top.values.double() / scores.double().sum(-1, keepdim=True)).log().tolist()
    ids = top.indices.tolist()
    for row, (g, node) in enumerate(nodes):
        if g.uses_q:
            g.draft_probs[node] = q[row]
    return [_drop_impossible(row, values, width) for row, values, width in zip(ids, log_probs, widths, strict=True)]


def _allocate_widths(nodes: Sequence[tuple[TreeBuilder, int]], q: Tensor) -> list[int]:
    """Return the number of children of every node, from q [R, V] for sampled dynamic trees."""
    widths: list[int] = []
    while len(widths) < len(nodes):
        g, first = nodes[len(widths)][0], len(widths)
        rows = q[first : first + len(g.frontier)]
        if g.uses_q and not g.tree_spec.is_static:
            widths += g.allocate_children(rows.topk(min(g.tree_spec.width, rows.shape[-1]), -1).values.tolist())
        else:
            widths += [g.num_children(node) for node in g.frontier]
    return widths


def _drop_impossible(ids: Sequence[int], log_probs: Sequence[float], width: int) -> list[ScoredChild]:
    """Keep at most `width` children, without those of probability 0 or NaN (NaN compares false)."""
    pairs = zip(ids[:width], log_probs[:width], strict=True)
    return [(token, min(log_prob, 0.0)) for token, log_prob in pairs if log_prob > -math.inf]


def _relax_greedy_sampling(g: TreeBuilder) -> Sampling:
    """Return the sampling settings for a draft. A greedy draft ranks tokens, so it drops temperature and filters."""
    s = g.request.spec.sampling
    return replace(s, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0) if s.is_greedy else s
