"""The exact distribution of a step whose tree was merged from a sampling and a deterministic drafter, by enumeration.

Every draft that can be sampled is weighted, and for each of them the rule is walked through all its decisions: a
uniform is a branch that splits the probability. Guards against a deterministic token that counts as sampled, a sampled
token dropped because it equals a deterministic one, the wrong order of the two kinds, and q of another node.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from foredraft.drafters.draft import Draft
from foredraft.drafters.ensemble.tree_merge import MergedTree, stack_trees
from foredraft.request import Batch
from foredraft.sampling.params import Sampling
from foredraft.tree import TokenTree
from foredraft.verification import rules, siblings
from foredraft.verification.probs import Probs
from foredraft.verification.rules import REJECT
from tests.support.exact_steps import iterate_outcomes
from tests.support.requests import make_request

V, LENGTH, ROOT = 4, 3, 0
Tokens = tuple[int, ...]
CONTEXTS = [c for n in range(LENGTH + 1) for c in itertools.product(range(V), repeat=n)]
ROW = {context: row for row, context in enumerate(CONTEXTS)}


def make_distributions(stream: int, sharpness: float = 1.0) -> torch.Tensor:
    """[contexts, V]"""
    generator = torch.Generator().manual_seed(stream)
    noise = torch.randn(len(CONTEXTS), V, generator=generator, dtype=torch.float64)
    return (sharpness * noise).softmax(-1)


P, Q = make_distributions(0, 1.5), make_distributions(1, 1.5)
BOTH = (P * 0.5 + Q * 0.5) ** 1.5  # a drafter that is mostly right
BOTH /= BOTH.sum(-1, keepdim=True)


def outcomes(tree: TokenTree) -> Iterator[tuple[float, Tokens, np.ndarray]]:
    """(chance, accepted tokens, distribution of the token after them) of every way a step can go."""
    rows = [ROW[tuple(tree.get_draft_path(0, node))] for node in range(tree.sizes[0])]
    return iterate_outcomes(lambda noise: rules.reject(tree, P[rows], noise))  # type: ignore[arg-type]


def compute_joint_probs(drafts: Iterator[tuple[float, TokenTree]]) -> tuple[np.ndarray, float]:
    """Compute the probabilities of the next LENGTH tokens, and how many draft tokens are accepted."""
    probs, accepted = np.zeros([V] * LENGTH), 0.0
    prefixes: dict[Tokens, float] = defaultdict(float)
    for mass, tree in drafts:
        for weight, kept, last in outcomes(tree):
            accepted += mass * weight * len(kept)
            for token in np.flatnonzero(last):
                prefixes[(*kept, int(token))[:LENGTH]] += mass * weight * float(last[token])
    for prefix, mass in prefixes.items():
        for rest in itertools.product(range(V), repeat=LENGTH - len(prefix)):
            text = (*prefix, *rest)
            chance = np.prod([float(P[ROW[text[:i]], text[i]]) for i in range(len(prefix), LENGTH)])
            probs[text] += mass * chance
    return probs, accepted


def truth() -> np.ndarray:
    every = itertools.product(range(V), repeat=LENGTH)
    return np.array([np.prod([float(P[ROW[t[:i]], t[i]]) for i in range(LENGTH)]) for t in every]).reshape([V] * LENGTH)


@dataclass(frozen=True)
class World:
    """Shape and drafts of a case: `parents` [n] of the sampled nodes, root first; `guess` adds deterministic tokens."""

    parents: Tokens
    guess: Callable[["Drawn"], list[tuple[int, Draft]]]  # (node it stands below, draft)
    q: torch.Tensor = field(default_factory=lambda: BOTH)
    most: int = 9


@dataclass(frozen=True)
class Drawn:
    """One draft: tokens of the nodes below the root."""

    tokens: Tokens
    parents: Tokens

    def path(self, node: int) -> Tokens:
        found: Tokens = ()
        while node:
            found, node = (self.tokens[node - 1], *found), self.parents[node]
        return found


def enumerate_drafts(world: World) -> Iterator[tuple[float, Drawn]]:
    """Enumerate the drafts with their probabilities: siblings are sampled without replacement."""
    found: list[tuple[float, Tokens]] = [(1.0, ())]
    for node in range(1, len(world.parents)):
        parent, grown = world.parents[node], []
        for mass, tokens in found:
            probs = world.q[ROW[Drawn(tokens, world.parents).path(parent)]].numpy().copy()
            probs[[tokens[n - 1] for n in range(1, node) if world.parents[n] == parent]] = 0
            probs /= probs.sum()
            grown += [(mass * float(probs[x]), (*tokens, x)) for x in range(V)]
        found = [(mass, tokens) for mass, tokens in grown if mass > 0]
    for mass, tokens in found:
        yield mass, Drawn(tokens, world.parents)


def own_tree(world: World, draft: Drawn) -> TokenTree:
    inner = set(world.parents)
    rows = [
        world.q[ROW[draft.path(node)]] if node in inner else torch.zeros(V, dtype=torch.float64)
        for node in range(len(world.parents))
    ]
    return TokenTree.from_lists([[ROOT, *draft.tokens]], [list(world.parents)], torch.stack(rows))


BATCH = Batch((make_request(0, [ROOT], Sampling(), rule=REJECT),), (1,), (9,))


def merge(world: World, draft: Drawn) -> TokenTree:
    """Merge both drafts with the code under test."""
    joint = MergedTree.from_tree(own_tree(world, draft), 0, 0)
    for at, guess in world.guess(draft):
        joint.graft(guess, world.most, at)
    return stack_trees(BATCH, [joint])


def likeliest(draft: Drawn) -> list[tuple[int, Draft]]:
    """Return the target's likeliest tokens, which were often sampled, too."""
    first = int(P[ROW[()]].argmax())
    return [(0, Draft.from_chain([first, int(P[ROW[first,]].argmax())]))]


def unlikely(draft: Drawn) -> list[tuple[int, Draft]]:
    first = int(P[ROW[()]].argmin())
    return [(0, Draft.from_chain([first, int(P[ROW[first,]].argmax())]))]


def branches(draft: Drawn) -> list[tuple[int, Draft]]:
    first, second = P[ROW[()]].topk(2).indices.tolist()
    return [(0, Draft((first, second, 1), (0, 0, 2)))]


def below_the_end(draft: Drawn) -> list[tuple[int, Draft]]:
    """Extend the last node by a token that depends on those above it."""
    last = len(draft.tokens)
    return [(last, Draft.from_chain([(sum(draft.path(last)) + 1) % V]))]


def by_all_that_was_drawn(draft: Drawn) -> list[tuple[int, Draft]]:
    """Add a deterministic sibling of the root's samples that depends on the tokens below them and may be absent."""
    token = (draft.tokens[-1] + 1) % V
    return [(0, Draft.from_chain([token]))] if draft.tokens[-1] != 2 else []


GUESSES = {g.__name__: g for g in (likeliest, unlikely, branches, below_the_end, by_all_that_was_drawn)}
SHAPES: dict[str, Tokens] = {"chain": (-1, 0, 1), "siblings": (-1, 0, 0, 1), "siblings below": (-1, 0, 1, 1)}
DISTRIBUTIONS = {"near": BOTH, "far": Q, "equal": P}


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_merged_tree_keeps_the_joint_distribution_of_three_tokens(shape: str, guess: str, kind: str) -> None:
    world = World(SHAPES[shape], GUESSES[guess], DISTRIBUTIONS[kind])
    probs, accepted = compute_joint_probs((mass, merge(world, draft)) for mass, draft in enumerate_drafts(world))
    assert np.abs(probs - truth()).max() < 1e-12
    alone = compute_joint_probs((mass, own_tree(world, draft)) for mass, draft in enumerate_drafts(world))[1]
    assert accepted >= alone - 1e-12
    if kind != "equal" and guess in ("likeliest", "branches", "below_the_end"):
        assert accepted > alone + 1e-3


def test_a_merged_tree_with_no_room_for_all_keeps_the_distribution() -> None:
    world = World(SHAPES["siblings"], branches, most=4)
    probs, _ = compute_joint_probs((mass, merge(world, draft)) for mass, draft in enumerate_drafts(world))
    assert np.abs(probs - truth()).max() < 1e-12


def test_the_distribution_under_a_draw_that_was_guessed_too_is_the_one_of_the_guess_twice() -> None:
    """A deterministic token with or without a node of its own: the same distribution and the same acceptance."""
    world = World(SHAPES["chain"], likeliest)
    twice = ((mass, _guess_kept_twice(world, draft)) for mass, draft in enumerate_drafts(world))
    once = ((mass, merge(world, draft)) for mass, draft in enumerate_drafts(world))
    (one, accepted), (other, accepted_too) = compute_joint_probs(once), compute_joint_probs(twice)
    assert np.abs(one - other).max() < 1e-12
    assert accepted >= accepted_too - 1e-12


def _guess_kept_twice(world: World, draft: Drawn) -> TokenTree:
    tree = own_tree(world, draft)
    [(_, guess)] = world.guess(draft)
    assert tree.q is not None
    tokens, parents = [*tree.tokens[0], guess.tokens[0]], [*tree.parents[0], 0]
    q = torch.cat([tree.q, tree.q.new_zeros(1, V)])
    return TokenTree([tokens], [parents], q, num_sampled_children=(*map(len, tree.children[0]), 0))


# faults


def _guesses_as_draws(world: World, draft: Drawn) -> TokenTree:
    """Mark every node as sampled."""
    return replace(merge(world, draft), num_sampled_children=None)


def _draw_dropped_for_a_guess(world: World, draft: Drawn) -> TokenTree:
    """Replace a sampled node that equals the deterministic token by that one, without a q."""
    tree, guess = own_tree(world, draft), world.guess(draft)[0][1].tokens[0]
    assert tree.q is not None
    if draft.tokens[0] == guess:
        return TokenTree.from_lists([[ROOT, guess]], [[-1, 0]])
    return merge(world, draft)


def _unlikely_draws_dropped(world: World, draft: Drawn) -> TokenTree:
    """Drop an unlikely sampled draft in favour of the deterministic one."""
    if float(world.q[ROW[()], draft.tokens[0]]) < 0.3:
        [(_, guess)] = world.guess(draft)
        return TokenTree.from_lists([[ROOT, *guess.tokens]], [[-1, *guess.parents]])
    return merge(world, draft)


def _rows_shifted(world: World, draft: Drawn) -> TokenTree:
    tree = merge(world, draft)
    assert tree.q is not None
    return replace(tree, q=torch.cat([tree.q[1:2], tree.q[:1], tree.q[2:]]))


def _longer_where_lucky(world: World, draft: Drawn) -> TokenTree:
    """Choose the draft to verify by the sampled tokens."""
    if draft.tokens[0] == int(P[ROW[()]].argmin()):
        [(_, guess)] = world.guess(draft)
        return TokenTree.from_lists([[ROOT, *guess.tokens]], [[-1, *guess.parents]])
    return own_tree(world, draft)


FAULTS = [
    _guesses_as_draws, _draw_dropped_for_a_guess, _unlikely_draws_dropped, _rows_shifted, _longer_where_lucky,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_distribution_of_a_step_kills_a_fault_of_merging(fault: Callable[[World, Drawn], TokenTree]) -> None:
    world = World(SHAPES["chain"], likeliest, Q)
    probs, _ = compute_joint_probs((mass, fault(world, draft)) for mass, draft in enumerate_drafts(world))
    assert np.abs(probs - truth()).sum() / 2 > 1e-3


def _residual_kept(tree: TokenTree, b: int, node: int, size: int) -> Iterator[tuple[int, int, Probs]]:
    """Keep the residual unchanged after a deterministic token is rejected."""
    for child, token, q in _siblings(tree, b, node, size):
        is_guess = q.ids is not None and len(q.mass) == 1
        yield child, token, replace(q, mass=q.mass * 1e-9) if is_guess else q


_siblings = siblings.iterate_siblings


def test_the_distribution_of_a_step_kills_guesses_that_leave_the_residual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "iterate_siblings", _residual_kept)
    world = World(SHAPES["chain"], likeliest, Q)
    probs, _ = compute_joint_probs((mass, merge(world, draft)) for mass, draft in enumerate_drafts(world))
    assert np.abs(probs - truth()).sum() / 2 > 1e-3


@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_draws_before_guesses_accept_no_less_than_guesses_before_draws(kind: str) -> None:
    """The inequality in `siblings.iterate_siblings`, for one of each."""
    p, q = P[ROW[()]].numpy(), DISTRIBUTIONS[kind][ROW[()]].numpy()
    for guess in range(V):
        others = [y for y in range(V) if y != guess]
        draw_first = p[guess] + sum(min(p[y], q[y]) for y in others)
        guess_first = p[guess] + sum(min(p[y], (1 - p[guess]) * q[y]) for y in others)
        world = World((-1, 0), lambda _, g=guess: [(0, Draft.from_chain([g]))], DISTRIBUTIONS[kind])
        _, accepted = compute_joint_probs((mass, merge(world, draft)) for mass, draft in enumerate_drafts(world))
        assert accepted == pytest.approx(draw_first, abs=1e-12)
        assert draw_first >= guess_first
