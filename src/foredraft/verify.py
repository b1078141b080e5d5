"""Verification rules: pure functions `rule(tree, p, coins) -> Commit`.

p is the target's law, q the draft's. Randomness is an argument, so every rule can be tested exactly and replayed.
Coins lie in the open interval (0, 1) and comparisons are strict: a token the target gives probability zero is never
accepted. All arithmetic on probabilities is float64.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft import noise
from foredraft.noise import Purpose
from foredraft.tree import Commit, TokenTree


@dataclass(frozen=True)
class Coins:
    """The randomness of one verification."""

    keys: Tensor | None  # [R] int64 noise keys of the target's own draws; None where every law is one-hot
    accept: Tensor  # [B, N] float64 decides on a drafted node
    draw: Tensor  # [B, N] float64 draws the token after the node where the walk ends

    @classmethod
    def of(cls, tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> "Coins":
        """Keyed by (seed, sample) and the sequence position of each request's first node.

        The target's draws depend on the position drawn for alone. The coins of `reject` also depend on where the step
        began: a later step must not see again the coins by which an earlier one rejected.
        """
        keys: list[int] = []
        width = tree.tokens.shape[1]
        accept, draw = torch.full((len(seeds), width), 0.5).double(), torch.full((len(seeds), width), 0.5).double()
        for b, ((seed, sample), start) in enumerate(zip(seeds, positions, strict=True)):
            root, began = tree.roots[b], start + tree.roots[b]
            for node in range(root, tree.sizes[b]):
                keys.append(noise.key(seed, sample, Purpose.TOKEN, start + tree.depths[b][node] + 1))
                accept[b, node] = noise.coin(seed, sample, Purpose.ACCEPT, began, node - root)
                draw[b, node] = noise.coin(seed, sample, Purpose.DRAW, began, node - root)
        return cls(torch.tensor(keys, dtype=torch.int64), accept, draw)

    def select(self, requests: Sequence[int], rows: Tensor) -> "Coins":
        """The coins of some requests, whose rows of p are given."""
        mine = list(requests)
        keys = None if self.keys is None else self.keys[rows.to(self.keys.device)]
        return Coins(keys, self.accept[mine], self.draw[mine])


Rule = Callable[[TokenTree, Tensor, Coins], Commit]
Walk = tuple[list[int], list[int]]  # nodes from the root down, and the token after each


class NotALawError(Exception):
    """A row of p was not finite: this request fails, alone."""


def match(tree: TokenTree, p: Tensor, coins: Coins) -> Commit:
    """The target draws after every node by keyed noise; a drafted child is accepted if it equals the draw.

    The text is the same whatever the drafter, the draft length, the batch or preemption (2408.07978 for chains).
    """
    choice = p.argmax(-1) if coins.keys is None else noise.race(p, coins.keys.to(p.device)).argmax(-1)
    drawn = choice.tolist()
    total = p.sum(-1)
    is_law = (total.isfinite() & (total > 0)).tolist()

    def walk(b: int) -> Walk:
        node, nodes, tokens = tree.roots[b], [], []
        while True:
            row = tree.row(b, node)
            if not is_law[row]:
                raise NotALawError
            nodes.append(node)
            tokens.append(drawn[row])
            child = [c for c in tree.children[b][node] if tree.token_lists[b][c] == drawn[row]]
            if not child:
                return nodes, tokens
            node = child[0]

    return _commit(tree, walk, choice)


def reject(tree: TokenTree, p: Tensor, coins: Coins) -> Commit:
    """Speculative sampling (2211.17192, 2302.01318), on trees by recursive rejection over siblings drawn without
    replacement (SpecInfer 2305.09781, Sequoia 2402.12374)."""

    def walk(b: int) -> Walk:
        node, nodes, tokens = tree.roots[b], [], []
        while True:
            nodes.append(node)
            residual = _law(p, tree.row(b, node))
            accepted = None
            for child, x, q in _siblings(tree, b, node, len(residual)):
                if float(coins.accept[b, child]) * q[x] < residual[x]:
                    accepted = child
                    tokens.append(x)
                    break
                residual = _normalised((residual - q).clamp_min(0), residual)
            if accepted is None:
                tokens.append(draw(residual, float(coins.draw[b, node])))
                return nodes, tokens
            node = accepted

    return _commit(tree, walk)


def block(tree: TokenTree, p: Tensor, coins: Coins) -> Commit:
    """Block verification (2403.10444, algorithm 2): chains only, accepts no less than `reject` in expectation."""
    if not tree.is_chain:
        raise ValueError("block verification takes chains; use verify='reject' with a drafter that proposes trees")

    def walk(b: int) -> Walk:
        chain = list(range(tree.roots[b], tree.sizes[b]))
        drafted = tree.token_lists[b]
        steps: list[tuple[Tensor, Tensor]] = []  # (law, q) at every node that has a usable draft below it
        for node in chain[:-1]:
            law = _law(p, tree.row(b, node))
            below = list(_siblings(tree, b, node, len(law)))
            if not below:
                break
            steps.append((law, below[0][2]))
            if law[below[0][1]] <= 0:  # nothing below is ever kept, and its law need not exist
                break
        weights, survived = [1.0], 0  # weights[i]: p_i of the paper, the joint ratio capped at one on the way
        for i, (law, q) in enumerate(steps):
            x = drafted[chain[i + 1]]
            weights.append(min(weights[-1] * float(law[x]) / float(q[x]), 1.0))
            if i + 1 < len(steps):
                following, q_following = steps[i + 1]
                rest = float((weights[-1] * following - q_following).clamp_min(0).sum())
                bar = rest / (rest + 1 - weights[-1]) if rest + 1 - weights[-1] > 0 else 1.0
            else:
                bar = weights[-1]
            if float(coins.accept[b, chain[i + 1]]) < bar:
                survived = i + 1
        nodes = chain[: survived + 1]
        law = _law(p, tree.row(b, nodes[-1]))
        if survived < len(steps):
            law = _normalised((weights[survived] * law - steps[survived][1]).clamp_min(0), law)
        last = draw(law, float(coins.draw[b, nodes[-1]]))
        return nodes, [*(drafted[n] for n in nodes[1:]), last]

    return _commit(tree, walk)


@dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance (2401.10774, section 2.3.1). Lossy: accepts x where p(x) > min(eps, delta e^-H(p)),
    takes the longest accepted path and draws the next token from p."""

    threshold: float = 0.3  # eps, `posterior_threshold` there
    alpha: float = 0.09  # delta, `posterior_alpha` there

    def __call__(self, tree: TokenTree, p: Tensor, coins: Coins) -> Commit:
        def walk(b: int) -> Walk:
            paths = [[tree.roots[b]]]
            for path in paths:  # grows while it is read: breadth first, so the last path is a longest one
                law = _law(p, tree.row(b, path[-1]))
                bar = min(self.threshold, self.alpha * float(torch.exp(torch.special.entr(law).sum().neg())))
                children = tree.children[b][path[-1]]
                inside = [c for c in children if tree.token_lists[b][c] < len(law)]
                good = [c for c in inside if float(law[tree.token_lists[b][c]]) > bar]
                paths += [[*path, c] for c in good]
            longest = max(map(len, paths))
            path = next(path for path in paths if len(path) == longest)
            last = draw(_law(p, tree.row(b, path[-1])), float(coins.draw[b, path[-1]]))
            return path, [*(tree.token_lists[b][n] for n in path[1:]), last]

        return _commit(tree, walk)


def draw(law: Tensor, u: float) -> int:
    """The first token whose cumulative probability exceeds u; never one of probability zero."""
    mass = law.cumsum(0)
    index = int((mass <= u * mass[-1]).sum())
    return index if index < len(law) and law[index] > 0 else int(law.nonzero()[-1])


def force(tree: TokenTree, b: int) -> Walk:
    """The leading nodes whose successors are committed already: kept, without looking at any law."""
    known = tree.known[b] if tree.known else ()
    return list(range(len(known))), list(known)


def _commit(tree: TokenTree, walk: Callable[[int], Walk], choice: Tensor | None = None) -> Commit:
    paths: list[list[int]] = []
    tokens: list[list[int]] = []
    failed: set[int] = set()
    for b, (size, root) in enumerate(zip(tree.sizes, tree.roots, strict=True)):
        nodes, following = force(tree, b)
        if root < size:
            try:
                more_nodes, more_following = walk(b)
                nodes, following = nodes + more_nodes, following + more_following
            except NotALawError:
                failed.add(b)
                nodes, following = [], []
        paths.append(nodes)
        tokens.append(following)
    return Commit.of(paths, tokens, choice=choice, failed=frozenset(failed))


def _law(p: Tensor, row: int) -> Tensor:
    law = p[row].double().cpu()
    total = law.sum()
    if not total.isfinite() or total <= 0:
        raise NotALawError
    return law / total


def _normalised(residual: Tensor, fallback: Tensor) -> Tensor:
    """A residual of no mass arises from rounding where p and q agree; p itself is then the law."""
    total = residual.sum()
    return residual / total if total > 0 else fallback


def _siblings(tree: TokenTree, b: int, node: int, size: int) -> Iterator[tuple[int, int, Tensor]]:
    """(child, its token, the law it was drawn from given its elder siblings), in order.

    Guesses (no q, or a row of zeros) are one-hot: lossless however they were found, for they knew no coin.
    Ends where q is no law of this vocabulary, or could not have drawn the token: what a broken drafter proposes there
    is no draft.
    """
    children = tree.children[b][node]
    if not children:
        return
    tokens = tree.token_lists[b]
    q = torch.zeros(size).double() if tree.q is None else tree.q[tree.row(b, node)].double().cpu()
    guesses = not bool(q.any())
    for child in children:
        x = tokens[child]
        if x >= size or len(q) != size:  # not of the target's vocabulary
            return
        q = _one_hot(x, size) if guesses else q
        total = float(q.sum())
        if not math.isfinite(total) or total <= 0 or float(q[x]) <= 0 or float(q.min()) < 0:
            return
        q = q / total
        yield child, x, q
        q = q.clone()
        q[x] = 0


def _one_hot(x: int, size: int) -> Tensor:
    q = torch.zeros(size, dtype=torch.float64)
    q[x] = 1
    return q


def per_request(names: Sequence[str]) -> Rule:
    """The rule of a batch whose requests asked for different ones."""
    if len(set(names)) == 1:
        return RULES[names[0]]

    def rule(tree: TokenTree, p: Tensor, coins: Coins) -> Commit:
        paths: list[list[int]] = [[] for _ in names]
        tokens: list[list[int]] = [[] for _ in names]
        failed: set[int] = set()
        for name in sorted(set(names)):  # every rule sees its own requests alone: `block` would refuse others' trees
            mine = [b for b, other in enumerate(names) if other == name]
            rows = torch.tensor([r for b in mine for r in range(*tree.first_rows[b : b + 2])], dtype=torch.int64)
            commit = RULES[name](tree.select(mine), p[rows.to(p.device)], coins.select(mine, rows))
            for i, b in enumerate(mine):
                paths[b], tokens[b] = commit.path_lists[i], commit.token_lists[i]
            failed |= {mine[i] for i in commit.failed}
        return Commit.of(paths, tokens, failed=frozenset(failed))

    return rule


RULES: dict[str, Rule] = {"match": match, "reject": reject, "block": block, "typical": Typical()}
LOSSY = frozenset({"typical"})
