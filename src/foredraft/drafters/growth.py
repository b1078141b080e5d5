"""How a draft grows: a chain, a tree of a fixed shape, or EAGLE-2's tree of the likeliest paths (2406.16858).

A drafter gives logits after the nodes it is asked for, level by level; what is drawn or guessed from them, which nodes
are looked at next and which are verified in the end is decided here, alike for every method.
"""

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foredraft import noise
from foredraft.drafters.base import Draft, draft_key
from foredraft.drafters.rank_tree import RankTree
from foredraft.errors import ForedraftError
from foredraft.filters import likeliest
from foredraft.request import Request
from foredraft.sampling import Sampling, distribution

MOST_NODES, WIDEST = 2048, 256  # of a draft; beyond that it is a slip of the finger, and would take all memory
Child = tuple[int, float]  # a token, and the logarithm of the chance that it is right if its parent is


@dataclass(frozen=True)
class Plan:
    """What a draft may become. Without a `shape`, every level looks at the `width` likeliest nodes of the last and
    gives each `width` children; the `nodes` likeliest of all are verified. Width 1 is a chain.

    EAGLE-2's authors write total_tokens = nodes + 1 and depth = `depth` - 1 of the same tree.
    """

    depth: int
    nodes: int
    width: int = 1
    shape: RankTree | None = None  # where it is known before anything is drafted
    candidates: int | None = None  # so many whole paths of the shape are verified, the likeliest; None = all of it
    min_confidence: float = 0.0  # a draft ends where no path of it is likelier than this

    @classmethod
    def of(
        cls,
        num_tokens: int,
        tree_nodes: int | None = None,
        top_k: int | None = None,
        branching: Sequence[int] | None = None,
        min_confidence: float = 0.0,
    ) -> "Plan":
        """From a method's options. Raises ForedraftError where they make no tree."""
        if not 0 <= min_confidence < 1:
            raise ForedraftError(f"min_confidence must lie in 0..1, got {min_confidence}")
        if branching is not None:
            if tree_nodes is not None or top_k is not None:
                raise ForedraftError("branching fixes the whole tree; give it without tree_nodes and top_k")
            if not branching or min(branching) < 1:
                raise ForedraftError(f"branching takes positive numbers of children by depth, got {tuple(branching)}")
            size = sum(itertools.accumulate(branching, operator.mul))
            if size > MOST_NODES:
                raise ForedraftError(
                    f"branching {tuple(branching)} is {size} nodes; a draft takes {MOST_NODES} at most"
                )
            return cls.shaped(RankTree.complete(branching), min_confidence)
        if tree_nodes is None and top_k is None:
            return cls(num_tokens, num_tokens, min_confidence=min_confidence)
        nodes = 16 if tree_nodes is None else tree_nodes
        width = min(4, nodes) if top_k is None else top_k
        if not 1 <= nodes <= MOST_NODES:
            raise ForedraftError(f"tree_nodes must be positive and at most {MOST_NODES}, got {nodes}")
        if not 1 <= width <= WIDEST:
            raise ForedraftError(f"top_k must be positive and at most {WIDEST}, got {width}")
        return cls(num_tokens, nodes, width, min_confidence=min_confidence)

    @classmethod
    def shaped(cls, shape: RankTree, min_confidence: float = 0.0) -> "Plan":
        return cls(shape.depth, len(shape), shape.width, shape, min_confidence=min_confidence)

    def whole_paths(self, count: int) -> "Plan":
        """Of a shape that is drafted whole, only the `count` likeliest paths from the root to a leaf are verified."""
        return replace(self, candidates=count, nodes=min(self.nodes, count * self.depth))

    def cut(self, depth: int, budget: int, is_chain: bool) -> "Plan":
        """What a request has room for; `block` verification takes chains."""
        depth = min(depth, self.depth)
        if is_chain or (self.width == 1 and self.shape is None):
            depth = min(depth, budget)
            return Plan(depth, depth, min_confidence=self.min_confidence)
        if self.shape is None:
            return replace(self, depth=depth, nodes=min(self.nodes, budget))
        if self.candidates is not None:
            made = Plan.shaped(self.shape.cut(min(depth, budget), len(self.shape)), self.min_confidence)
            made = made.whole_paths(self.candidates)
            return replace(made, nodes=min(made.nodes, budget))
        return Plan.shaped(self.shape.cut(depth, budget), self.min_confidence)

    @property
    def is_fixed(self) -> bool:
        """Its shape does not depend on what is drawn."""
        return self.width == 1 or self.shape is not None


@dataclass(frozen=True)
class TreeOptions:
    """A chain of num_speculative_tokens, or with `tree_nodes` or `top_k` EAGLE-2's dynamic tree of that depth: at every
    level the top_k likeliest nodes get top_k children each, and the tree_nodes likeliest of all are verified.

    `branching` fixes the tree's shape instead: children of every node by depth. `min_confidence`: a draft ends where
    its likeliest path is less likely than this.
    """

    tree_nodes: int | None = None
    top_k: int | None = None
    branching: tuple[int, ...] | None = None
    min_confidence: float = 0.0

    @property
    def has_tree(self) -> bool:
        return (self.tree_nodes, self.top_k, self.branching) != (None, None, None)

    def plan(self, num_tokens: int) -> Plan:
        return Plan.of(num_tokens, self.tree_nodes, self.top_k, self.branching, self.min_confidence)


@dataclass(frozen=True)
class Scores:
    """Logits after some nodes. A drafter of a smaller vocabulary says which ids its columns are."""

    logits: Tensor  # [R, W]
    vocab_size: int
    ids: Tensor | None = None  # [W] int64, rising; None = 0..W

    def full(self) -> Tensor:
        """[R, V] with -inf for tokens that are never drafted."""
        if self.ids is None and self.logits.shape[-1] == self.vocab_size:
            return self.logits
        every = self.logits.new_full((len(self.logits), self.vocab_size), -torch.inf)
        every[:, slice(self.logits.shape[-1]) if self.ids is None else self.ids] = self.logits
        return every

    def named(self, columns: list[list[int]]) -> list[list[int]]:
        """Columns as token ids."""
        return columns if self.ids is None else self.ids[torch.tensor(columns)].tolist()


@dataclass
class Growth:
    """One request's draft while it grows. Node 0 is the root."""

    request: Request
    plan: Plan
    tokens: list[int] = field(default_factory=list)  # [i] is node i + 1
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=lambda: [0])
    chances: list[float] = field(default_factory=lambda: [0.0])  # logarithm, that the path down to a node is right
    laws: dict[int, Tensor] = field(default_factory=dict)  # node -> [V] the law its children were drawn from
    frontier: list[int] = field(default_factory=lambda: [0])  # the nodes to look at next
    best: list[int] = field(default_factory=list)  # of a tree that is chosen by its chances: what it keeps so far
    places: list[int] = field(default_factory=lambda: [0])  # every node's number in the plan's shape, if it has one

    def __post_init__(self) -> None:
        if self.draws and self.plan.candidates is not None:  # nothing drawn is dropped: its nodes are allotted instead
            self.plan = replace(self.plan, shape=None, candidates=None)

    @property
    def is_greedy(self) -> bool:
        return self.request.sampling.is_greedy

    @property
    def draws(self) -> bool:
        """Children come from a law q that the verification weighs; otherwise they are guesses."""
        return not self.is_greedy and self.request.verify in ("reject", "block")

    @property
    def drops_nodes(self) -> bool:
        """Only the likeliest of what was found are verified. Nothing drawn is dropped, and no part of a fixed shape."""
        return not self.draws and not self.plan.is_fixed

    @property
    def shares_noise(self) -> bool:
        return not self.is_greedy and self.request.verify == "match"

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to a node."""
        result = []
        while node:
            result.append(self.tokens[node - 1])
            node = self.parents[node - 1]
        return result[::-1]

    def width(self, node: int) -> int:
        """Children a node gets."""
        shape = self.plan.shape
        return self.plan.width if shape is None else len(shape.children[self.places[node]])

    def allotted(self, likeliest: Sequence[Sequence[float]]) -> list[int]:
        """How many children to draw below every frontier node, from the largest probabilities of its law, falling.

        Which tokens will be drawn is not known yet, and what is drawn stays: a tree that kept the likeliest of them
        afterwards would have no q. The nodes left are spread over the levels left, the upper ones getting more.
        """
        levels = self.plan.depth - self.depths[self.frontier[0]]
        left = self.plan.nodes - len(self.tokens)
        gains = [
            (self.chances[node] + math.log(max(q, 1e-300)), -i)
            for i, (node, top) in enumerate(zip(self.frontier, likeliest, strict=True))
            for q in top[: self.plan.width]
        ]
        best = sorted(gains, reverse=True)[: -(-2 * left // (levels + 1))]
        return [sum(-place == i for _, place in best[:left]) for i in range(len(self.frontier))]

    def grow(self, children: Sequence[Sequence[Child]]) -> None:
        """One level more: the children of every frontier node."""
        below = []
        for node, found in zip(self.frontier, children, strict=True):
            if self.plan.shape is not None:
                self.places += self.plan.shape.children[self.places[node]][: len(found)]
            for token, chance in found:
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                self.chances.append(self.chances[node] + chance)
                below.append(len(self.tokens))
        if self.drops_nodes:
            every = [*self.best, *below]
            self.best = sorted(every, key=lambda node: (-self.chances[node], node))[: self.plan.nodes]
        self.frontier = self._next(below)

    def _next(self, below: list[int]) -> list[int]:
        """Which of the newest nodes to look at: none beyond an end of text, none that is hardly likely."""
        if not below or self.depths[below[0]] >= self.plan.depth:
            return []
        ends, bar = self.request.end_ids, self.plan.min_confidence
        bar = math.log(bar) if bar > 0 else -math.inf
        if self.draws:  # a cut may depend on what q was before it, never on the tokens drawn after
            below = below if self._certainty(below[0]) >= bar else []
        else:
            below = [node for node in below if self.chances[node] >= bar]
        below = [node for node in below if self.tokens[node - 1] not in ends]
        if self.plan.shape is not None:
            return [node for node in below if self.width(node) > 0]
        if self.draws and len(self.tokens) >= self.plan.nodes:  # nothing is left to allot
            return []
        if self.drops_nodes:  # a child is behind its parent: none of the last one kept is ever kept
            alive = set(self.best[: self.plan.nodes - 1])
            below = [node for node in below if node in alive]
        return sorted(sorted(below, key=lambda node: -self.chances[node])[: self.plan.width])

    def _certainty(self, node: int) -> float:
        """Logarithm of the product of the largest probabilities of q above a node, on its path."""
        total = 0.0
        while node:
            node = self.parents[node - 1]
            total += math.log(max(float(self.laws[node].max()), 1e-300))
        return total

    @property
    def kept(self) -> list[int]:
        """The nodes that are verified, rising, the root first."""
        # a node is never likelier than its parent and comes after it, so what is kept has its ancestors
        if self.plan.candidates is not None:
            return self._whole_paths(self.plan.candidates)
        return [0, *sorted(self.best)] if self.drops_nodes else list(range(len(self.depths)))

    def _whole_paths(self, count: int) -> list[int]:
        """The nodes of the likeliest paths that end at a leaf, as many as the plan has room for."""
        inner, kept = set(self.parents), {0}
        leaves = [node for node in range(1, len(self.depths)) if node not in inner]
        for leaf in sorted(leaves, key=lambda node: (-self.chances[node], node))[:count]:
            path, node = {leaf}, leaf
            while node:
                node = self.parents[node - 1]
                path.add(node)
            if len(kept | path) <= self.plan.nodes + 1:
                kept |= path
        return sorted(kept)

    def draft(self) -> Draft:
        if self.laws:
            blank = torch.zeros_like(next(iter(self.laws.values())))
            q = torch.stack([self.laws.get(node, blank) for node in range(len(self.depths))])
            return Draft(tuple(self.tokens), tuple(self.parents), q)
        kept = self.kept
        if len(kept) == len(self.depths):
            return Draft(tuple(self.tokens), tuple(self.parents))
        index = {node: i for i, node in enumerate(kept)}
        tokens = tuple(self.tokens[node - 1] for node in kept[1:])
        return Draft(tokens, tuple(index[self.parents[node - 1]] for node in kept[1:]))


def extend(growths: Sequence[Growth], scores: Scores) -> None:
    """One level more for every draft, from the logits after their frontier nodes, in order."""
    nodes = [(g, node) for g in growths for node in g.frontier]
    if all(g.is_greedy and not g.request.sampling.shapes_logits for g in growths):
        found = _guesses(nodes, scores)
    else:
        found = _children(nodes, scores.full())
    children = iter(found)
    for g in growths:
        g.grow([next(children) for _ in g.frontier])


def _guesses(nodes: Sequence[tuple[Growth, int]], scores: Scores) -> list[list[Child]]:
    """The likeliest tokens of every row, whatever the sampling."""
    x = scores.logits.float() if scores.logits.dtype != torch.float64 else scores.logits
    if all(g.plan.width == 1 and not g.plan.min_confidence for g, _ in nodes):  # nothing depends on the chances
        best = likeliest(x)
        ids = scores.named([[max(column, 0)] for column in best])
        return [[(row[0], 0.0)] if column >= 0 else [] for row, column in zip(ids, best, strict=True)]
    widths = [g.width(node) for g, node in nodes]
    top = x.log_softmax(-1).topk(min(max(widths), x.shape[-1]), -1)  # a third of the time of logsumexp
    chances, ids = top.values.tolist(), scores.named(top.indices.tolist())
    return [_likely(row, values, width) for row, values, width in zip(ids, chances, widths, strict=True)]


def _children(nodes: Sequence[tuple[Growth, int]], logits: Tensor) -> list[list[Child]]:
    """Drawn, raced or guessed under the request's own parameters, from [R, V]."""
    samplings = [_sampling(g) for g, _ in nodes]
    history = None
    if any(s.shapes_logits for s in samplings):
        history = [g.request.history(g.path(node)) for g, node in nodes]
    q = distribution(logits, samplings, history)
    scores = q
    if any(not g.is_greedy for g, _ in nodes):
        keys = torch.tensor([draft_key(g.request, node, g.depths[node]) for g, node in nodes], device=q.device)
        races = torch.tensor([g.draws or g.shares_noise for g, _ in nodes], device=q.device)
        scores = torch.where(races[:, None], noise.race(q, keys), q.double())
    widths = _widths(nodes, q)
    top = scores.topk(min(max(1, *widths), scores.shape[-1]), -1)
    chances = (top.values.double() / scores.double().sum(-1, keepdim=True)).log().tolist()
    ids = top.indices.tolist()
    for row, (g, node) in enumerate(nodes):
        if g.draws:
            g.laws[node] = q[row]
    return [_likely(row, values, width) for row, values, width in zip(ids, chances, widths, strict=True)]


def _widths(nodes: Sequence[tuple[Growth, int]], q: Tensor) -> list[int]:
    """Children of every node; those to be drawn in a tree of no fixed shape are allotted by their laws [R, V]."""
    widths: list[int] = []
    while len(widths) < len(nodes):
        g, first = nodes[len(widths)][0], len(widths)
        rows = q[first : first + len(g.frontier)]
        if g.draws and not g.plan.is_fixed:
            widths += g.allotted(rows.topk(min(g.plan.width, rows.shape[-1]), -1).values.tolist())
        else:
            widths += [g.width(node) for node in g.frontier]
    return widths


def _likely(ids: Sequence[int], chances: Sequence[float], width: int) -> list[Child]:
    """Without what has no probability, and without NaN, which compares false."""
    pairs = zip(ids[:width], chances[:width], strict=True)
    return [(token, min(chance, 0.0)) for token, chance in pairs if chance > -math.inf]


def _sampling(g: Growth) -> Sampling:
    """Greedy drafts guess by rank, and a one-hot law has none: what is cut off to sample does not matter to them."""
    s = g.request.sampling
    return replace(s, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0) if s.is_greedy else s
