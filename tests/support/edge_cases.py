"""Directed distributions and uniforms: corners that random tests do not reach, and the checker that visits them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from foredraft.tree import TokenTree
from foredraft.verification.noise import NoiseTable
from foredraft.verification.rule import VerifyFunction

V, PADDING = 8, 2  # the last two ids pad the vocabulary: the target never samples them
TINY = 5e-324


def make_distribution(*mass: float) -> torch.Tensor:
    return torch.tensor([*mass, *[0.0] * (V - len(mass))], dtype=torch.float64)


EVEN = make_distribution(1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6)
# p, q; the drafted token is 1, then 2
PAIRS: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
    "p = q": (EVEN, EVEN),
    "p = q but for rounding": (EVEN, EVEN * (1 + 2**-52)),
    "p = q in single precision": (EVEN.float(), EVEN),
    "a guess": (EVEN, None),
    "p[d] = 0": (make_distribution(0.5, 0, 0, 0.5), EVEN),
    "p[d] = 0, guessed": (make_distribution(0.5, 0, 0, 0.5), None),
    "p[d] = 0, q tiny": (make_distribution(0.5, 0, 0, 0.5), make_distribution(1, TINY, TINY)),
    "p[d] = 0, q[d] = 0": (make_distribution(0.5, 0, 0, 0.5), make_distribution(1.0)),
    "q[d] = 0": (EVEN, make_distribution(0.5, 0, 0, 0.5)),
    "q[d] tiny": (EVEN, make_distribution(1, TINY, TINY)),
    "p[d] tiny": (make_distribution(1, TINY, TINY), EVEN),
    "both tiny": (make_distribution(1, TINY, TINY), make_distribution(1, TINY, TINY)),
    "support of one, drafted": (make_distribution(0, 1), make_distribution(0, 1)),
    "support of one, likely drafted": (make_distribution(0, 1), EVEN),
    "support of one, not drafted": (make_distribution(1), make_distribution(0, 0.5, 0.5)),
    "support of one, the last id": (make_distribution(0, 0, 0, 0, 0, 1), EVEN),
    "disjoint": (make_distribution(0, 0, 0, 0.5, 0.5), make_distribution(0, 0.5, 0.5)),
    "zero residual": (make_distribution(0.25, 0.5, 0.25), make_distribution(0.25, 0.5, 0.25)),
    "p below q but on one id": (make_distribution(0.1, 0.4, 0.4, 0.1), make_distribution(0.05, 0.45, 0.4, 0.1)),
    "q on padding": (EVEN, torch.full((V,), 1 / V, dtype=torch.float64)),
    "q on padding alone, but for the draft": (EVEN, make_distribution(0, TINY, TINY, 0, 0, 0, 0.5, 0.5)),
    "q unnormalised": (EVEN, make_distribution(3, 9, 9)),
    "p unnormalised": (make_distribution(4, 2, 2), EVEN),
    "p huge and tiny": (make_distribution(1, 1e-300, 1e-300), make_distribution(1e-300, 1, 1)),
}
SHAPES = {"chain": (-1, 0, 1), "siblings": (-1, 0, 0), "longer": (-1, 0, 1, 2)}
UNIFORMS = (2.0**-53, 1 - 2.0**-53, 0.5, 0.0, TINY)


@dataclass(frozen=True)
class EdgeCase:
    """One directed case; a string for the test's name."""

    pair: str
    shape: str

    def __str__(self) -> str:
        return f"{self.pair}, {self.shape}"


EDGES = [EdgeCase(pair, shape) for pair in PAIRS for shape in SHAPES]


def make_batch(edge: EdgeCase) -> tuple[TokenTree, torch.Tensor, NoiseTable]:
    """Make every choice of extreme uniforms for the first two draft nodes and for the sampled token, in one batch."""
    (p, q), parents = PAIRS[edge.pair], SHAPES[edge.shape]
    size = len(parents)
    choices = list(itertools.product(UNIFORMS, UNIFORMS, UNIFORMS))
    tokens = [0, 1, 2, 3][:size]
    rows = len(choices) * size
    tree = TokenTree.from_lists(
        [tokens] * len(choices), [parents] * len(choices), None if q is None else q.expand(rows, -1)
    )
    accept = torch.tensor([[0.5, a, b, a][:size] for a, b, _ in choices], dtype=torch.float64)
    draw = torch.tensor([[u] * size for _, _, u in choices], dtype=torch.float64)
    keys = torch.arange(rows) * 6364136223846793005
    return tree, p.expand(rows, -1), NoiseTable(keys, accept, draw)


def find_impossible_tokens(rule: VerifyFunction, edge: EdgeCase) -> Iterator[str]:
    """Report tokens of a rule that have probability 0 under the target, and requests left without a token."""
    tree, p, noise = make_batch(edge)
    commit = rule(tree, p, noise)
    for b in sorted(commit.failed):
        yield f"request {b} failed"
    for b, (path, tokens) in enumerate(zip(commit.paths, commit.tokens, strict=True)):
        if not tokens:
            yield f"request {b} got no token"
        for node, token in zip(path, tokens, strict=True):
            if not 0 <= token < V or not p[tree.get_row(b, node), token] > 0:
                accept, sample = noise.accept_table[b].tolist(), noise.sample_table[b, 0].item()
                yield f"request {b}: token {token} at {accept}, {sample}"
