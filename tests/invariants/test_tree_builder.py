"""Distribution of a step whose tree growth depends on its sampled tokens: many steps at once, against enumeration.

Children are allotted before they are sampled and none is dropped afterwards. Everything else that decides the growth
(budget, end of text, low confidence) may depend on sampled tokens and on distributions. Guards against trees that
keep their likeliest sampled tokens, noise that a node shares with its parent, and q of another node; each of them
is seeded here and caught.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.drafters.common import tree_level
from foredraft.drafters.common.tree_builder import NodeLogits, TreeBuilder, TreeSpec
from foredraft.drafters.common.tree_level import add_level
from foredraft.drafters.draft import Draft, draft_noise_key, to_token_tree
from foredraft.request import Batch, Request
from foredraft.sampling import rng
from foredraft.sampling.distribution import distribution
from foredraft.sampling.params import Sampling
from foredraft.sampling.rng import NoiseStream
from foredraft.verification.noise import SeededNoise
from foredraft.verification.registry import RULES
from tests.support.requests import make_request
from tests.support.statistical_checks import ALPHA, chi_square

V, LENGTH = 6, 3  # tokens of a step that are counted jointly; a draft is that deep
PROMPT = [1, 2]
SAMPLING = Sampling(temperature=0.9, max_tokens=50)
STEPS = 2500
CONTEXTS = [c for n in range(LENGTH + 1) for c in itertools.product(range(V), repeat=n)]
ROW = {context: row for row, context in enumerate(CONTEXTS)}


@cache
def logits(stream: int) -> Tensor:
    """[contexts, V] of the target (0) or the draft (1), which is far from it."""
    generator = torch.Generator().manual_seed(stream)
    return 1.3 * torch.randn(len(CONTEXTS), V, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    plan: TreeSpec
    sampling: Sampling = SAMPLING
    rule: str = "reject"
    ends: frozenset[int] = frozenset()
    budget: int = 99
    depth: int = LENGTH


TREE = TreeSpec.from_options(LENGTH, tree_nodes=7, top_k=3)
WIDE = TreeSpec.from_options(LENGTH, branching=(4, 2, 1))
CHAINS = TreeSpec.from_options(LENGTH, num_drafts=4)
CASES = {
    "free": Case(TREE),
    "top-k and top-p": Case(TREE, replace(SAMPLING, top_k=4, top_p=0.9)),
    "few tokens are allowed": Case(TreeSpec.from_options(LENGTH, tree_nodes=12, top_k=4), replace(SAMPLING, top_k=2)),
    "ends of text": Case(TREE, ends=frozenset({0, 3})),
    "unsure": Case(replace(TREE, min_confidence=0.15)),
    "small budget": Case(TREE, budget=3),
    "near the end": Case(TREE, depth=2),
    "wider than it has nodes": Case(TreeSpec.from_options(LENGTH, tree_nodes=2, top_k=5)),
    "fixed": Case(TreeSpec.from_options(LENGTH, branching=(3, 2, 1))),
    "independent chains": Case(CHAINS, rule="spectr"),
    "independent chains, ends of text": Case(CHAINS, rule="spectr", ends=frozenset({0, 3})),
    "independent chains, small budget": Case(CHAINS, rule="spectr", budget=5),
    "independent chains, unsure": Case(replace(CHAINS, min_confidence=0.15), rule="spectr"),
    "independent chains, few tokens": Case(CHAINS, replace(SAMPLING, top_k=2), rule="spectr"),
    "independent tree": Case(TreeSpec.from_options(LENGTH, branching=(3, 2, 1)), rule="spectr"),
    "chains that part at the root": Case(CHAINS),
    "free, spectr": Case(TREE, rule="spectr"),
    "unsure chain, block": Case(TreeSpec.from_options(LENGTH, min_confidence=0.2), rule="block", ends=frozenset({0})),
}


def grow(case: Case, count: int) -> list[TreeBuilder]:
    """Grow `count` trees, all together."""
    growths = [
        TreeBuilder(
            make_request(0, PROMPT, case.sampling, seed, eos_ids=case.ends, rule=RULES[case.rule]),
            case.plan.restrict(case.depth, case.budget, case.rule == "block"),
        )
        for seed in range(count)
    ]
    while growing := [g for g in growths if g.frontier]:
        rows = [ROW[tuple(g.collect_path(node))] for g in growing for node in g.frontier]
        add_level(growing, NodeLogits(logits(1)[rows], V))
    return growths


def compute_probs(case: Case) -> Tensor:
    """[contexts, V] of the target."""
    return distribution(logits(0), case.sampling)


def texts(case: Case, drafts: Sequence[Draft]) -> tuple[np.ndarray, int]:
    """Count the sequences of LENGTH tokens after one step, extended by plain decoding if shorter; and the number of
    accepted draft tokens."""
    request = make_request(0, PROMPT, case.sampling, rule=RULES[case.rule])
    batch = Batch((request,) * len(drafts), (len(PROMPT),) * len(drafts), (99,) * len(drafts))
    tree = to_token_tree(batch, dict(enumerate(drafts)))
    rows = [ROW[tuple(tree.get_draft_path(b, node))] for b, size in enumerate(tree.sizes) for node in range(size)]
    p = compute_probs(case)
    seeds = [(seed, 0) for seed in range(len(drafts))]
    commit = RULES[case.rule].verify(tree, p[rows], SeededNoise(tree, seeds, [len(PROMPT) - 1] * len(drafts)))
    generator = np.random.default_rng(0)
    counts = np.zeros([V] * LENGTH)
    for tokens in commit.tokens:
        text = tuple(tokens[:LENGTH])
        while len(text) < LENGTH:
            text = (*text, int(generator.choice(V, p=p[ROW[text]].numpy())))
        counts[text] += 1
    return counts, sum(len(tokens) - 1 for tokens in commit.tokens)


def compute_expected(case: Case) -> np.ndarray:
    p = compute_probs(case)
    every = itertools.product(range(V), repeat=LENGTH)
    distributions = [math.prod(float(p[ROW[text[:i]], token]) for i, token in enumerate(text)) for text in every]
    return np.array(distributions).reshape([V] * LENGTH)


def p_value(case: Case, count: int = STEPS, draft: Callable[[TreeBuilder], Draft] = TreeBuilder.to_draft) -> float:
    counts, accepted = texts(case, [draft(g) for g in grow(case, count)])
    assert accepted > count // 5
    wanted = compute_expected(case)
    above = [tuple(range(size, LENGTH)) for size in range(1, LENGTH + 1)]  # few cells see what is small everywhere
    return LENGTH * min(chi_square(counts.sum(axes), wanted.sum(axes)) for axes in above)


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_distribution_of_the_target(name: str) -> None:
    """With seeds, so that it is the same on every run."""
    assert p_value(CASES[name]) > ALPHA


@pytest.mark.parametrize("name", CASES)
def test_a_draft_keeps_to_its_plan(name: str) -> None:
    """A free tree is no chain, and its shape varies."""
    case = CASES[name]
    shapes = set()
    for g in grow(case, 200):
        draft = g.to_draft()
        assert 0 < len(draft.tokens) <= min(case.budget, case.plan.max_nodes)
        assert max(g.depths) <= case.depth
        assert all(g.tokens[parent - 1] not in case.ends for parent in g.parents if parent)
        shapes.add(draft.parents)
    has_one_shape = ("fixed", "wider than it has nodes", "small budget", "chains that part at the root")
    assert name in has_one_shape or len(shapes) > 1


# faults


def _without(g: TreeBuilder, kept: Sequence[int]) -> Draft:
    """List the nodes that are kept, rising, root first."""
    index = {node: i for i, node in enumerate(kept)}
    blank = torch.zeros(V, dtype=torch.float64)
    q = torch.stack([g.draft_probs.get(node, blank) for node in kept])
    return Draft(tuple(g.tokens[n - 1] for n in kept[1:]), tuple(index[g.parents[n - 1]] for n in kept[1:]), q)


def _likeliest_kept(g: TreeBuilder) -> Draft:
    """Sample more tokens than may be verified and drop those with the least q: such a tree has no valid q."""
    chances = [1.0]
    for token, parent in zip(g.tokens, g.parents, strict=True):
        chances.append(chances[parent] * float(g.draft_probs[parent][token]))
    return _without(g, sorted(sorted(range(len(chances)), key=lambda node: (-chances[node], node))[:6]))


def _unlikely_dropped(g: TreeBuilder) -> Draft:
    """Drop sampled leaves with a small q."""
    inner = set(g.parents)
    likely = [
        n for n in range(1, len(g.depths)) if n in inner or g.draft_probs[g.parents[n - 1]][g.tokens[n - 1]] > 0.25
    ]
    return _without(g, [0, *likely])


def _rows_shifted(g: TreeBuilder) -> Draft:
    """q of the node before."""
    draft = g.to_draft()
    assert draft.q is not None
    q = draft.q.clone()
    inner = sorted(set(g.parents))
    q[inner[1:]] = draft.q[inner[:-1]]
    return replace(draft, q=q)


DRAFTS = {
    "the likeliest of the drawn": (_likeliest_kept, WIDE),
    "the unlikely dropped": (_unlikely_dropped, WIDE),
    "q of the node before": (_rows_shifted, TREE),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_the_distribution_of_a_step_kills_drafts_that_are_not_what_was_drawn(name: str) -> None:
    draft, plan = DRAFTS[name]
    assert p_value(Case(plan), draft=draft) < ALPHA


def _same_for_every_node(request: Request, node: int, depth: int, stream: int, repeat: int = 0) -> int:
    return rng.derive_key(request.spec.seed, request.spec.sample_index, NoiseStream.DRAFT, request.num_tokens - 1)


def test_the_distribution_of_a_step_kills_noise_that_nodes_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_level, "draft_noise_key", _same_for_every_node)
    assert p_value(CASES["free"]) < ALPHA
    assert p_value(CASES["fixed"]) < ALPHA
    assert p_value(CASES["independent chains"]) < ALPHA


def _same_for_every_sample(request: Request, node: int, depth: int, stream: int, repeat: int = 0) -> int:
    return draft_noise_key(request, node, depth, stream)


def _neighbours_share(request: Request, node: int, depth: int, stream: int, repeat: int = 0) -> int:
    return draft_noise_key(request, node, depth, stream, repeat // 2)


@pytest.mark.parametrize("fault", [_same_for_every_sample, _neighbours_share])
def test_the_distribution_of_a_step_kills_noise_that_independent_samples_share(
    fault: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_level, "draft_noise_key", fault)
    assert p_value(CASES["independent chains"]) < ALPHA
