"""Verification rules: pure functions `rule(tree, p, coins) -> Commit`.

p is the target's law, q the draft's. Randomness is an argument, so every rule can be tested exactly and replayed.
Coins lie in the open interval (0, 1) and comparisons are strict: a token the target gives probability zero is never
accepted. All arithmetic on probabilities is float64. A rule asks for laws and coins at the nodes it visits, so both
may be made on demand (`Laws`, `Keyed`) or be there already (a tensor, `Coins`).

A request fails if the first node of its walk has no law. Further down the walk ends before such a node, so that what
leads there is committed, as it is without a draft, and the next step decides.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from foredraft import noise
from foredraft.laws import NO_LAW, Floats, Law, NotALawError, Rows, Table
from foredraft.noise import Purpose
from foredraft.tree import Commit, TokenTree


class Randomness(Protocol):
    """What decides in one verification."""

    def key(self, row: int) -> int | None:
        """The noise key of the target's own draw after a scored node; None where every law is one-hot."""

    def accepts(self, b: int, node: int) -> float:
        """The coin that decides on a drafted node."""

    def draws(self, b: int, node: int) -> float:
        """The coin that draws the token after the node where the walk ends."""

    def select(self, requests: Sequence[int], rows: Tensor) -> "Randomness":
        """That of some requests, whose rows of p are given."""


@dataclass(frozen=True)
class Keyed:
    """Randomness by (seed, sample) and the sequence position of each request's first node, made where it is needed.

    The target's draws depend on the position drawn for alone. The coins of `reject` also depend on where the step
    began: a later step must not see again the coins by which an earlier one rejected.
    """

    tree: TokenTree
    seeds: Sequence[tuple[int, int]]
    positions: Sequence[int]

    def key(self, row: int) -> int:
        b, node = self.tree.place(row)
        return noise.key(*self.seeds[b], Purpose.TOKEN, self.positions[b] + self.tree.depths[b][node] + 1)

    def accepts(self, b: int, node: int) -> float:
        return self._coin(Purpose.ACCEPT, b, node)

    def draws(self, b: int, node: int) -> float:
        return self._coin(Purpose.DRAW, b, node)

    def select(self, requests: Sequence[int], rows: Tensor) -> "Keyed":
        seeds, positions = [self.seeds[b] for b in requests], [self.positions[b] for b in requests]
        return Keyed(self.tree.select(requests), seeds, positions)

    def _coin(self, purpose: Purpose, b: int, node: int) -> float:
        root = self.tree.roots[b]
        return noise.coin(*self.seeds[b], purpose, self.positions[b] + root, node - root)


@dataclass(frozen=True)
class Coins:
    """The randomness of one verification as tables."""

    keys: Tensor | None  # [R] int64 noise keys of the target's own draws; None where every law is one-hot
    accept: Tensor  # [B, N] float64 decides on a drafted node
    draw: Tensor  # [B, N] float64 draws the token after the node where the walk ends

    @classmethod
    def of(cls, tree: TokenTree, seeds: Sequence[tuple[int, int]], positions: Sequence[int]) -> "Coins":
        """All of `Keyed`."""
        keyed = Keyed(tree, seeds, positions)
        accept, draw = (torch.full(tree.tokens.shape, 0.5, dtype=torch.float64) for _ in range(2))
        for b, (root, size) in enumerate(zip(tree.roots, tree.sizes, strict=True)):
            for node in range(root, size):
                accept[b, node], draw[b, node] = keyed.accepts(b, node), keyed.draws(b, node)
        keys = [keyed.key(row) for row in range(tree.first_rows[-1])]
        return cls(torch.tensor(keys, dtype=torch.int64), accept, draw)

    def key(self, row: int) -> int | None:
        return None if self.keys is None else int(self.keys[row])

    def accepts(self, b: int, node: int) -> float:
        return float(self.accept[b, node])

    def draws(self, b: int, node: int) -> float:
        return float(self.draw[b, node])

    def select(self, requests: Sequence[int], rows: Tensor) -> "Coins":
        mine = list(requests)
        keys = None if self.keys is None else self.keys[rows.to(self.keys.device)]
        return Coins(keys, self.accept[mine], self.draw[mine])


Rule = Callable[[TokenTree, Tensor | Rows, Randomness], Commit]
Walk = tuple[list[int], list[int]]  # nodes from the root down, and the token after each


def match(tree: TokenTree, p: Tensor | Rows, coins: Randomness) -> Commit:
    """The target draws after every node by keyed noise; a drafted child is accepted if it equals the draw.

    The text is the same whatever the drafter, the draft length, the batch or preemption (2408.07978 for chains).
    All requests walk down together, one level at a time, so that their draws are made together too.
    """
    laws = Table.of(p)
    walks: dict[int, Walk | None] = {}  # None: no law
    nodes = {b: root for b, root in enumerate(tree.roots) if root < tree.sizes[b]}
    while nodes:
        drawn = laws.tokens([tree.row(b, node) for b, node in nodes.items()], coins.key)
        below: dict[int, int] = {}
        for (b, node), token in zip(nodes.items(), drawn, strict=True):
            if token == NO_LAW:
                walks.setdefault(b, None)
                continue
            path, following = walks.get(b) or ([], [])
            walks[b] = (path, following)
            path.append(node)
            following.append(token)
            tokens = tree.token_lists[b]
            for child in tree.children[b][node]:
                if tokens[child] == token:
                    below[b] = child
                    break
        nodes = below

    def walked(b: int) -> Walk:
        walk = walks[b]
        if walk is None:
            raise NotALawError
        return walk

    return _commit(tree, walked, laws.drawn)


def reject(tree: TokenTree, p: Tensor | Rows, coins: Randomness) -> Commit:
    """Speculative sampling (2211.17192, 2302.01318), on trees by recursive rejection over siblings drawn without
    replacement (SpecInfer 2305.09781, Sequoia 2402.12374)."""
    laws = Table.of(p)

    def walk(b: int) -> Walk:
        node = tree.roots[b]
        nodes: list[int] = []
        tokens: list[int] = []
        while True:
            try:
                residual = laws.law(tree.row(b, node))
            except NotALawError:
                if not nodes:
                    raise
                return nodes, tokens
            nodes.append(node)
            accepted = None
            for child, x, q in _siblings(tree, b, node, residual.size):
                if coins.accepts(b, child) * q[x] < residual[x]:
                    accepted = child
                    tokens.append(x)
                    break
                residual = residual.residual(q).scaled(residual)
            if accepted is None:
                tokens.append(residual.draw(coins.draws(b, node)))
                return nodes, tokens
            node = accepted

    return _commit(tree, walk)


def block(tree: TokenTree, p: Tensor | Rows, coins: Randomness) -> Commit:
    """Block verification (2403.10444, algorithm 2): chains only, accepts no less than `reject` in expectation."""
    if not tree.is_chain:
        raise ValueError("block verification takes chains; use verify='reject' with a drafter that proposes trees")
    laws = Table.of(p)

    def walk(b: int) -> Walk:
        chain = list(range(tree.roots[b], tree.sizes[b]))
        drafted = tree.token_lists[b]
        steps: list[tuple[Law, Law]] = []  # (law, q) at every node that has a usable draft below it
        for node in chain[:-1]:
            try:
                law = laws.law(tree.row(b, node))
            except NotALawError:
                if not steps:
                    raise
                break
            below = list(_siblings(tree, b, node, law.size))
            if not below:
                break
            steps.append((law, below[0][2]))
            if law[below[0][1]] <= 0:  # nothing below is ever kept, and its law need not exist
                break
        weights, survived = [1.0], 0  # weights[i]: p_i of the paper, the joint ratio capped at one on the way
        for i, (law, q) in enumerate(steps):
            x = drafted[chain[i + 1]]
            weights.append(min(weights[-1] * law[x] / q[x], 1.0))
            if i + 1 < len(steps):
                following, q_following = steps[i + 1]
                rest = following.residual(q_following, weights[-1]).total
                bar = rest / (rest + 1 - weights[-1]) if rest + 1 - weights[-1] > 0 else 1.0
            else:
                bar = weights[-1]
            if coins.accepts(b, chain[i + 1]) < bar:
                survived = i + 1
        nodes = chain[: survived + 1]
        try:
            law = laws.law(tree.row(b, nodes[-1]))
        except NotALawError:
            if not survived:
                raise
            return nodes[:-1], [drafted[n] for n in nodes[1:]]
        if survived < len(steps):
            law = law.residual(steps[survived][1], weights[survived]).scaled(law)
        last = law.draw(coins.draws(b, nodes[-1]))
        return nodes, [*(drafted[n] for n in nodes[1:]), last]

    return _commit(tree, walk)


@dataclass(frozen=True)
class Typical:
    """Medusa's typical acceptance (2401.10774, section 2.3.1). Lossy: accepts x where p(x) > min(eps, delta e^-H(p))
    and takes the longest accepted path, of several the one of the largest joint probability.

    The defaults are those of the authors' `medusa_generate`, where delta is the square root of eps. There the token
    after the path is the likeliest one (`fast=True`), so that a text depends on no seed; `samples_last` samples it
    from p instead. The authors also pad short paths with token 0, judged by the logits of another node; that is a
    fault there and is left out.
    """

    threshold: float = 0.09  # eps, `posterior_threshold` there
    alpha: float = 0.3  # delta, `posterior_alpha` there
    samples_last: bool = False

    def __call__(self, tree: TokenTree, p: Tensor | Rows, coins: Randomness) -> Commit:
        laws = Table.of(p)

        def walk(b: int) -> Walk:
            tokens = tree.token_lists[b]
            paths = [([tree.roots[b]], 0.0)]  # with the logarithm of the joint probability of the tokens below the root
            for path, chance in paths:  # grows while it is read: breadth first
                try:
                    law = laws.law(tree.row(b, path[-1]))
                except NotALawError:
                    if len(path) == 1:
                        raise
                    continue
                bar = min(self.threshold, self.alpha * math.exp(-law.entropy))
                inside = [c for c in tree.children[b][path[-1]] if tokens[c] < law.size]
                paths += [([*path, c], chance + math.log(law[tokens[c]])) for c in inside if law[tokens[c]] > bar]
            best = max(paths, key=lambda found: (len(found[0]), found[1]))[0]
            accepted = [tokens[n] for n in best[1:]]
            try:
                law = laws.law(tree.row(b, best[-1]))
            except NotALawError:
                return best[:-1], accepted
            last = law.draw(coins.draws(b, best[-1])) if self.samples_last else law.likeliest
            return best, [*accepted, last]

        return _commit(tree, walk)


def draw(law: Tensor, u: float) -> int:
    """`Law.draw` of masses [V] given as a tensor."""
    mass: Floats = law.double().cpu().numpy()
    return Law(mass, len(mass)).draw(u)


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


def _siblings(tree: TokenTree, b: int, node: int, size: int) -> Iterator[tuple[int, int, Law]]:
    """(child, its token, the law it was drawn from given its elder siblings), in order.

    Guesses (no q, or a row of zeros) are one-hot: lossless however they were found, for they knew no coin.
    Ends where q is no law of this vocabulary, or could not have drawn the token: what a broken drafter proposes there
    is no draft.

    Where trees were merged, guesses stand after what was drawn (`tree.drawn`). That is the order to have them in:

    - It is lossless. Every candidate is tried against what its elders left, r, by the law it came from given them: q
      without the elders if it was drawn, one-hot if it was guessed. If x comes from q_x, accepting it with
      min(1, r(x) / q_x(x)) and going on with norm(max(0, r - q_x)) gives the law r, whatever q_x is (SpecInfer
      2305.09781, theorem 4.2, one law per candidate). A guess may depend on everything that was drawn, its siblings'
      descendants included: none of that knows the coins, or the target.
    - A guess that was drawn too needs no node of its own. A drawn token that was not accepted has r(x) < q_x(x), so
      nothing of it is left, and to try it once more changes nothing. The other way round it would: a draw that is
      dropped because it was guessed already leaves a q that nobody drew from.
    - It accepts no less than the other order. With one guess g and one draw, this one accepts
      p(g) + sum over y != g of min(p(y), q(y)), the other p(g) + sum over y != g of min(p(y), (1 - p(g)) q(y)).
    """
    children = tree.children[b][node]
    if not children:
        return
    tokens = tree.token_lists[b]
    row = tree.row(b, node)
    drawn_from = None if tree.q is None else tree.q[row].double().cpu().numpy()
    left = None if drawn_from is None or not drawn_from.any() else Law(drawn_from, len(drawn_from))
    num_drawn = 0 if left is None else len(children) if tree.drawn is None else tree.drawn[row]
    for place, child in enumerate(children):
        x = tokens[child]
        if x >= size or (drawn_from is not None and len(drawn_from) != size):  # not of the target's vocabulary
            return
        if left is None or place >= num_drawn:
            yield child, x, Law.one_hot(x, size)
            continue
        total = left.total
        if not math.isfinite(total) or total <= 0 or left[x] <= 0 or float(left.mass.min()) < 0:
            return
        q = left.scaled(left)
        yield child, x, q
        left = q.without(x)


def per_request(names: Sequence[str]) -> Rule:
    """The rule of a batch whose requests asked for different ones."""
    if len(set(names)) == 1:
        return RULES[names[0]]

    def rule(tree: TokenTree, p: Tensor | Rows, coins: Randomness) -> Commit:
        laws = Table.of(p)
        paths: list[list[int]] = [[] for _ in names]
        tokens: list[list[int]] = [[] for _ in names]
        failed: set[int] = set()
        for name in sorted(set(names)):  # every rule sees its own requests alone: `block` would refuse others' trees
            mine = [b for b, other in enumerate(names) if other == name]
            rows = torch.tensor([r for b in mine for r in range(*tree.first_rows[b : b + 2])], dtype=torch.int64)
            commit = RULES[name](tree.select(mine), laws.select(rows.tolist()), coins.select(mine, rows))
            for i, b in enumerate(mine):
                paths[b], tokens[b] = commit.path_lists[i], commit.token_lists[i]
            failed |= {mine[i] for i in commit.failed}
        return Commit.of(paths, tokens, failed=frozenset(failed))

    return rule


RULES: dict[str, Rule] = {"match": match, "reject": reject, "block": block, "typical": Typical()}
LOSSY = frozenset({"typical"})
