"""The exact distribution of one step under a rule, by enumeration of the samples and of the outcomes of every trial.

Samples with replacement: every node of a shape is one sample, and equal samples below one node of the tree share a
node. A rule compares the uniform of a node with probabilities; both outcomes of every comparison are followed, with
their probabilities. A uniform that is compared twice lies above its first bound.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from foredraft.tree import Commit, SampledSiblings, TokenTree
from foredraft.verification.probs import Probs
from foredraft.verification.rule import VerifyFunction

Tokens = tuple[int, ...]
ROOT_TOKEN = 0


@dataclass
class Outcomes:
    """Noise that answers comparisons: those given first, then yes. Its weight is the probability of the answers."""

    given: list[bool]
    num_asked: int = 0
    weight: float = 1.0
    low: dict[tuple[int, int], float] = field(default_factory=dict)  # lower end of a node's uniform

    def ask(self, place: tuple[int, int], bar: float) -> bool:
        low = self.low.get(place, 0.0)
        chance = min(max((bar - low) / (1 - low), 0.0), 1.0) if low < 1 else 0.0
        if self.num_asked == len(self.given):
            self.given.append(True)
        answer = self.given[self.num_asked]
        self.num_asked += 1
        self.weight *= chance if answer else 1 - chance
        if not answer:
            self.low[place] = max(low, min(bar, 1.0))
        return answer

    def get_key(self, row: int) -> None:
        return None

    def accept_uniform(self, b: int, node: int) -> "OpenUniform":
        return OpenUniform(self, (b, node))

    def sample_uniform(self, b: int, node: int) -> float:
        return 0.5


@dataclass(frozen=True)
class OpenUniform:
    """Uniform without a value."""

    outcomes: Outcomes
    place: tuple[int, int]
    factor: float = 1.0

    def __mul__(self, factor: float) -> "OpenUniform":
        return OpenUniform(self.outcomes, self.place, factor)

    def __lt__(self, bar: float) -> bool:
        return self.outcomes.ask(self.place, float(bar) / self.factor)


@dataclass(frozen=True)
class TableModels:
    """Target and draft as tables over V tokens, for all contexts shorter than `length`."""

    p: np.ndarray  # [contexts, V]
    q: np.ndarray  # [contexts, V]
    length: int

    @property
    def size(self) -> int:
        return self.p.shape[1]

    def find_row(self, context: Tokens) -> int:
        row = sum(self.size**n for n in range(len(context)))
        return row + sum(token * self.size**i for i, token in enumerate(reversed(context)))

    def compute_joint(self) -> np.ndarray:
        """Compute the target's probabilities of the next `length` tokens."""
        joint = np.zeros([self.size] * self.length)
        for text in itertools.product(range(self.size), repeat=self.length):
            joint[text] = np.prod([self.p[self.find_row(text[:i]), token] for i, token in enumerate(text)])
        return joint


def count_contexts(size: int, length: int) -> int:
    return sum(size**n for n in range(length))


def merge_samples(models: TableModels, shape: Sequence[int], samples: Sequence[int]) -> TokenTree:
    """Build the tree of samples with replacement: samples[n - 1] is the token of node n of a shape of parents."""
    node_of, tokens, parents = [0], [ROOT_TOKEN], [-1]
    contexts: list[Tokens] = [()]
    children: dict[int, list[int]] = defaultdict(list)
    for parent, token in zip(shape[1:], samples, strict=True):
        above = node_of[parent]
        node = next((c for c in children[above] if tokens[c] == token), len(tokens))
        if node == len(tokens):
            tokens.append(token)
            parents.append(above)
            contexts.append((*contexts[above], token))
        children[above].append(node)
        node_of.append(node)
    further = {
        (0, node): (SampledSiblings(torch.tensor(models.q[models.find_row(contexts[node])]), tuple(below), True),)
        for node, below in children.items()
        if below
    }
    return TokenTree([tokens], [parents], further_samples=further)


def enumerate_trees(models: TableModels, shape: Sequence[int]) -> Iterator[tuple[float, TokenTree]]:
    """Enumerate the trees of a shape with their probabilities."""
    found: list[tuple[float, Tokens, list[Tokens]]] = [(1.0, (), [()])]  # mass, samples, context of every node
    for parent in shape[1:]:
        found = [
            (mass * float(row[token]), (*samples, token), [*contexts, (*contexts[parent], token)])
            for mass, samples, contexts in found
            for row in [models.q[models.find_row(contexts[parent])]]
            for token in map(int, np.flatnonzero(row))
        ]
    for mass, samples, _ in found:
        yield mass, merge_samples(models, shape, samples)


def enumerate_outcomes(
    rule: VerifyFunction, models: TableModels, tree: TokenTree
) -> Iterator[tuple[float, Tokens, np.ndarray]]:
    """Yield (probability, accepted tokens, distribution of the token after them) of every outcome of a step."""
    paths = [tuple(tree.get_draft_path(0, node)) for node in range(tree.sizes[0])]
    rows = [models.find_row(path) if len(path) < models.length else 0 for path in paths]
    p = torch.tensor(models.p[rows])
    return iterate_outcomes(lambda noise: rule(tree, p, noise))  # type: ignore[arg-type]


def iterate_outcomes(verify: Callable[[Outcomes], Commit]) -> Iterator[tuple[float, Tokens, np.ndarray]]:
    """Yield (probability, accepted tokens, distribution of the token after them) of every outcome of one request."""
    last: list[np.ndarray] = []

    def record(probs: Probs, u: float) -> int:
        last.append(probs.gather(None) / probs.total)
        return 0

    given: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probs, "sample", record)
        while True:
            outcomes = Outcomes(given)
            commit = verify(outcomes)
            yield outcomes.weight, tuple(commit.tokens[0][:-1]), last.pop()
            given = given[: outcomes.num_asked]
            while given and not given[-1]:
                given.pop()
            if not given:
                return
            given[-1] = False


def compute_step(
    rule: VerifyFunction, models: TableModels, trees: Iterator[tuple[float, TokenTree]]
) -> tuple[np.ndarray, float]:
    """Compute the probabilities of the next `models.length` tokens, and the mean number of accepted draft tokens."""
    joint, accepted = np.zeros([models.size] * models.length), 0.0
    prefixes: dict[Tokens, float] = defaultdict(float)
    for mass, tree in trees:
        for weight, kept, last in enumerate_outcomes(rule, models, tree):
            accepted += mass * weight * len(kept)
            for token in map(int, np.flatnonzero(last)):
                prefixes[(*kept, token)[: models.length]] += mass * weight * float(last[token])
    for prefix, mass in prefixes.items():
        for rest in itertools.product(range(models.size), repeat=models.length - len(prefix)):
            text = (*prefix, *rest)
            later = [models.p[models.find_row(text[:i]), text[i]] for i in range(len(prefix), models.length)]
            joint[text] += mass * np.prod(later)
    return joint, accepted
