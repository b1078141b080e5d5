"""Directed laws and coins: the corners random tests do not reach, and the checker that walks through them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from foredraft.tree import TokenTree
from foredraft.verify import Coins, Rule

V, PADDING = 8, 2  # the last two ids are padding of the vocabulary: the target never draws them
TINY = 5e-324


def law(*mass: float) -> torch.Tensor:
    return torch.tensor([*mass, *[0.0] * (V - len(mass))], dtype=torch.float64)


EVEN = law(1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6)
# p, q; the drafted token is 1, then 2
PAIRS: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
    "p = q": (EVEN, EVEN),
    "p = q but for rounding": (EVEN, EVEN * (1 + 2**-52)),
    "p = q in single precision": (EVEN.float(), EVEN),
    "a guess": (EVEN, None),
    "p[d] = 0": (law(0.5, 0, 0, 0.5), EVEN),
    "p[d] = 0, guessed": (law(0.5, 0, 0, 0.5), None),
    "p[d] = 0, q tiny": (law(0.5, 0, 0, 0.5), law(1, TINY, TINY)),
    "p[d] = 0, q[d] = 0": (law(0.5, 0, 0, 0.5), law(1.0)),
    "q[d] = 0": (EVEN, law(0.5, 0, 0, 0.5)),
    "q[d] tiny": (EVEN, law(1, TINY, TINY)),
    "p[d] tiny": (law(1, TINY, TINY), EVEN),
    "both tiny": (law(1, TINY, TINY), law(1, TINY, TINY)),
    "support of one, drafted": (law(0, 1), law(0, 1)),
    "support of one, likely drafted": (law(0, 1), EVEN),
    "support of one, not drafted": (law(1), law(0, 0.5, 0.5)),
    "support of one, the last id": (law(0, 0, 0, 0, 0, 1), EVEN),
    "disjoint": (law(0, 0, 0, 0.5, 0.5), law(0, 0.5, 0.5)),
    "zero residual": (law(0.25, 0.5, 0.25), law(0.25, 0.5, 0.25)),
    "p below q but on one id": (law(0.1, 0.4, 0.4, 0.1), law(0.05, 0.45, 0.4, 0.1)),
    "q on padding": (EVEN, torch.full((V,), 1 / V, dtype=torch.float64)),
    "q on padding alone, but for the draft": (EVEN, law(0, TINY, TINY, 0, 0, 0, 0.5, 0.5)),
    "q unnormalised": (EVEN, law(3, 9, 9)),
    "p unnormalised": (law(4, 2, 2), EVEN),
    "p huge and tiny": (law(1, 1e-300, 1e-300), law(1e-300, 1, 1)),
}
SHAPES = {"chain": (-1, 0, 1), "siblings": (-1, 0, 0), "longer": (-1, 0, 1, 2)}
COINS = (2.0**-53, 1 - 2.0**-53, 0.5, 0.0, TINY)


@dataclass(frozen=True)
class Edge:
    """One directed case; a string for the test's name."""

    pair: str
    shape: str

    def __str__(self) -> str:
        return f"{self.pair}, {self.shape}"


EDGES = [Edge(pair, shape) for pair in PAIRS for shape in SHAPES]


def batch_of(edge: Edge) -> tuple[TokenTree, torch.Tensor, Coins]:
    """Every choice of extreme coins for the first two drafted nodes and for the draw, in one batch."""
    (p, q), parents = PAIRS[edge.pair], SHAPES[edge.shape]
    size = len(parents)
    choices = list(itertools.product(COINS, COINS, COINS))
    tokens = [0, 1, 2, 3][:size]
    rows = len(choices) * size
    tree = TokenTree.of([tokens] * len(choices), [parents] * len(choices), None if q is None else q.expand(rows, -1))
    accept = torch.tensor([[0.5, a, b, a][:size] for a, b, _ in choices], dtype=torch.float64)
    draw = torch.tensor([[u] * size for _, _, u in choices], dtype=torch.float64)
    keys = torch.arange(rows) * 6364136223846793005
    return tree, p.expand(rows, -1), Coins(keys, accept, draw)


def impossible_tokens(rule: Rule, edge: Edge) -> Iterator[str]:
    """What a rule emits that the target could not have, and requests left without a token."""
    tree, p, coins = batch_of(edge)
    commit = rule(tree, p, coins)
    for b in sorted(commit.failed):
        yield f"request {b} failed"
    for b, (path, tokens) in enumerate(zip(commit.path_lists, commit.token_lists, strict=True)):
        if not tokens:
            yield f"request {b} got no token"
        for node, token in zip(path, tokens, strict=True):
            if not 0 <= token < V or not p[tree.row(b, node), token] > 0:
                yield f"request {b}: token {token} at coins {coins.accept[b].tolist()}, {coins.draw[b, 0].item()}"
