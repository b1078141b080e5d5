"""Block verification of chains whose end depends on their tokens, by enumeration of every draft.

A chain may end after any token if that follows from the tokens up to there: the proof of 2403.10444 needs
P(i tokens are accepted | the first i draft tokens) = w_i at every node, by induction from the last one. A chain whose
end depends on a token that it then leaves out has another q than it states.
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from foredraft.tree import TokenTree
from foredraft.verification.noise import NoiseTable
from foredraft.verification.probs import DenseProbs
from foredraft.verification.rules import BLOCK
from tests.support.statistical_checks import total_variation

V, DEPTH, ROOT = 3, 3, 0  # a step commits DEPTH + 1 tokens at most
LOW, HIGH = 1e-13, 1 - 1e-13
Tokens = tuple[int, ...]
EndFunction = Callable[["World", Tokens], bool]


class World:
    """Random p and q after every path of draft tokens."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        paths = [path for size in range(DEPTH + 1) for path in itertools.product(range(V), repeat=size)]
        self.p = {path: generator.dirichlet(np.ones(V)) for path in paths}
        self.q = {path: generator.dirichlet(np.ones(V)) for path in paths}

    def continue_plainly(self, prefix: Tokens) -> np.ndarray:
        """Return the joint distribution of DEPTH + 1 tokens that begin with a prefix, the rest from p."""
        joint = np.zeros((V,) * (DEPTH + 1))
        if len(prefix) == DEPTH + 1:
            joint[prefix] = 1
            return joint
        for token in range(V):
            joint += self.p[prefix][token] * self.continue_plainly((*prefix, token))
        return joint

    def list_drafts(self, ends: EndFunction, prefix: Tokens = ()) -> list[tuple[float, Tokens]]:
        """Return every draft with its probability; `ends` says whether a chain ends after a path."""
        if len(prefix) == DEPTH or ends(self, prefix):
            return [(1.0, prefix)]
        return [
            (self.q[prefix][token] * mass, draft)
            for token in range(V)
            for mass, draft in self.list_drafts(ends, (*prefix, token))
        ]

    def commit(self, draft: Tokens, accept: list[float], sample: float) -> Tokens:
        rows = [draft[:i] for i in range(len(draft) + 1)]
        q = torch.tensor(np.array([self.q[row] for row in rows]))
        q[-1] = 0
        tree = TokenTree.from_chains([[ROOT, *draft]], q)
        noise = NoiseTable(None, torch.tensor([[0.5, *accept]]).double(), torch.full((1, len(rows)), sample).double())
        return tuple(BLOCK.verify(tree, torch.tensor(np.array([self.p[row] for row in rows])), noise).tokens[0])

    def find_threshold(self, draft: Tokens, i: int) -> float:
        """Return the uniform below which i draft tokens are accepted, if no longer prefix is."""
        low, high = 0.0, 1.0
        for _ in range(45):
            middle = (low + high) / 2
            uniforms = [HIGH] * len(draft)
            uniforms[i - 1] = middle
            low, high = (middle, high) if len(self.commit(draft, uniforms, 0.5)) == i + 1 else (low, middle)
        return low

    def integrate_ending(self, draft: Tokens, i: int) -> np.ndarray:
        """Return the distribution of the token after i accepted ones, by the uniform where each token begins."""
        uniforms = [HIGH] * len(draft)
        if i:
            uniforms[i - 1] = LOW
        edges = [0.0]
        for token in range(1, V):
            low, high = 0.0, 1.0
            for _ in range(45):
                middle = (low + high) / 2
                low, high = (low, middle) if self.commit(draft, uniforms, middle)[-1] >= token else (middle, high)
            edges.append(low)
        return np.diff([*edges, 1.0])

    def integrate_step(self, ends: EndFunction) -> np.ndarray:
        """Return the joint distribution of the tokens of a step, continued by the target."""
        joint = np.zeros((V,) * (DEPTH + 1))
        for mass, draft in self.list_drafts(ends):
            rest = mass  # that no longer prefix is accepted
            for i in range(len(draft), -1, -1):
                accepted = rest * (self.find_threshold(draft, i) if i else 1.0)
                rest -= accepted
                if accepted < 1e-12:  # the threshold is 0, so no uniform reaches this ending
                    continue
                for token, share in enumerate(self.integrate_ending(draft, i)):
                    joint += accepted * share * self.continue_plainly((*draft[:i], token))
        return joint


def end_after_an_unlikely_token(world: World, path: Tokens) -> bool:
    return bool(path) and world.q[path[:-1]][path[-1]] < 0.3


ENDS: dict[str, EndFunction] = {
    "fixed length": lambda world, path: False,
    "end token": lambda world, path: bool(path) and path[-1] == 1,
    "unlikely token": end_after_an_unlikely_token,
    "flat q": lambda world, path: max(world.q[path]) < 0.55,  # `min_confidence`: before a token is sampled from q
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ENDS)
def test_a_chain_may_end_after_any_token_that_it_keeps(name, seed):
    """Exact up to bisection and rounding, so there are no false alarms."""
    world = World(seed)
    lengths = {len(draft) for _, draft in world.list_drafts(ENDS[name])}
    assert (len(lengths) > 1) == (name != "fixed length")
    assert total_variation(world.integrate_step(ENDS[name]), world.continue_plainly(())) < 1e-6


def test_a_chain_that_leaves_out_an_unlikely_token_changes_the_distribution():
    """Guards the checker: such a chain is not what `DrafterSpec.is_chain` declares."""
    world = World(0)
    drafts = world.list_drafts(end_after_an_unlikely_token)
    assert any(draft and end_after_an_unlikely_token(world, draft) for _, draft in drafts)
    world.list_drafts = lambda ends: [
        (mass, draft[:-1] if draft and ends(world, draft) else draft) for mass, draft in drafts
    ]
    assert total_variation(world.integrate_step(end_after_an_unlikely_token), world.continue_plainly(())) > 1e-3


class CountingProbs(DenseProbs):
    """Target probabilities that record which rows were read."""

    def __init__(self, p: torch.Tensor) -> None:
        super().__init__(p)
        self.rows: set[int] = set()

    def get_probs(self, row: int):
        self.rows.add(row)
        return super().get_probs(row)


def test_no_distribution_is_computed_behind_the_last_token_that_can_be_accepted():
    """Guards the cost of `block`: with weight 0.1 after one token and q = 1/2, later weights reach 0.2, 0.4 at most."""
    q = torch.tensor([[0.5, 0.5]] * 3 + [[0.0, 0.0]]).double()
    tree = TokenTree.from_chains([[0, 1, 1, 1]], q)
    p = torch.tensor([[0.95, 0.05]] * 4).double()
    for uniforms, rows in (([0.5, 0.5, 0.5], {0}), ([0.5, 0.15, 0.5], {0, 1}), ([0.5, 0.5, 0.3], {0, 1})):
        probs = CountingProbs(p)
        noise = NoiseTable(None, torch.tensor([[0.5, *uniforms]]).double(), torch.full((1, 4), 0.5).double())
        assert BLOCK.verify(tree, probs, noise).tokens == [[0]]
        assert probs.rows == rows
