"""The distribution of texts under a grammar: the target's own one, without the forbidden tokens of each row.

Many steps at once over trees sampled from a draft's distribution, counted against enumeration. Guards against masks of
another position (the root's, the parent's, a sibling's), each of them seeded here and caught, and drafts that were made
under another mask than the target's.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from foredraft.drafters.common.tree_builder import NodeLogits, TreeBuilder, TreeSpec
from foredraft.drafters.common.tree_level import add_level
from foredraft.request import Request
from foredraft.sampling.distribution import distribution
from foredraft.sampling.grammar import Grammar
from foredraft.sampling.grammar_cursor import GrammarCursor
from foredraft.sampling.grammar_matcher import GrammarMatcher
from foredraft.sampling.grammar_tokens import AllowedTokens
from foredraft.sampling.params import Sampling
from foredraft.tree import TokenTree
from foredraft.verification.noise import SeededNoise
from foredraft.verification.registry import RULES
from tests.support.grammar_cases import END, NINE_TOKENS, make_grammars
from tests.support.requests import change_spec, make_request
from tests.support.statistical_checks import ALPHA, chi_square

V, LENGTH = len(NINE_TOKENS), 3
PROMPT = [1, 2]
GRAMMAR = Grammar.regex("(a|b|ab|bc)*(c|[{]a*[}])+")
SAMPLING = Sampling(temperature=0.9, max_tokens=50, grammar=GRAMMAR)
STEPS = 2500
CONTEXTS = [c for n in range(LENGTH + 1) for c in itertools.product(range(V), repeat=n)]
ROW = {context: row for row, context in enumerate(CONTEXTS)}
PLANS = {
    "chain": ("reject", TreeSpec.from_options(LENGTH)),
    "tree": ("reject", TreeSpec.from_options(LENGTH, tree_nodes=7, top_k=3)),
    "fixed tree": ("reject", TreeSpec.from_options(LENGTH, branching=(3, 2, 1))),
    "chain, block": ("block", TreeSpec.from_options(LENGTH)),
}


@cache
def logits(stream: int) -> Tensor:
    """[contexts, V] of the target (0) or the draft (1), which is far from it."""
    generator = torch.Generator().manual_seed(stream)
    return 1.3 * torch.randn(len(CONTEXTS), V, generator=generator, dtype=torch.float64)


def matcher() -> GrammarMatcher:
    return make_grammars().create_matcher(GRAMMAR, (END,))


def requests(count: int, rule: str, follow: GrammarMatcher) -> list[Request]:
    """They share a matcher, for all of them stand after the same output."""
    return [
        make_request(0, PROMPT, SAMPLING, seed, eos_ids=frozenset({END}), rule=RULES[rule], matcher=follow)
        for seed in range(count)
    ]


def compute_probs(text: Sequence[int]) -> Tensor:
    """[V] by hand: the target's softmax over what the grammar allows, from a matcher that saw nothing else."""
    mask = matcher().find_allowed(list(text)).mask
    assert mask is not None
    p = (logits(0)[ROW[tuple(text)]] / SAMPLING.temperature).softmax(-1) * mask
    return p / p.sum()


@cache
def compute_expected() -> dict[tuple[int, ...], float]:
    """Compute the probability of every text of LENGTH tokens, or shorter with its end."""
    found: dict[tuple[int, ...], float] = {}
    grown: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while grown:
        text, chance = grown.pop()
        if len(text) == LENGTH or END in text:
            found[text] = chance
        else:
            grown += [((*text, token), chance * float(p)) for token, p in enumerate(compute_probs(text)) if p > 0]
    assert math.isclose(sum(found.values()), 1)
    return found


def drafts(name: str, count: int, follow: GrammarMatcher) -> list[TreeBuilder]:
    rule, plan = PLANS[name]
    growths = [TreeBuilder(request, plan) for request in requests(count, rule, follow)]
    while growing := [g for g in growths if g.frontier]:
        rows = [ROW[tuple(g.collect_path(node))] for g in growing for node in g.frontier]
        add_level(growing, NodeLogits(logits(1)[rows], V))
    return growths


def texts(name: str, growths: Sequence[TreeBuilder], verified_by: GrammarMatcher) -> dict[tuple[int, ...], int]:
    """Count the outputs of one step each, extended by plain decoding if shorter."""
    made = [g.to_draft() for g in growths]
    q = torch.cat([d.q for d in made if d.q is not None])
    tree = TokenTree.from_lists([[PROMPT[-1], *d.tokens] for d in made], [[-1, *d.parents] for d in made], q)
    rule = PLANS[name][0]
    paths = [tuple(tree.get_draft_path(b, node)) for b, size in enumerate(tree.sizes) for node in range(size)]
    shared = requests(1, rule, verified_by)[0]
    rows = {
        path: distribution(logits(0)[[ROW[path]]], SAMPLING, [shared.build_history(path)])[0] for path in set(paths)
    }
    p = torch.stack([rows[path] for path in paths])
    assert p.isfinite().all()
    noise = SeededNoise(tree, [(i, 0) for i in range(len(made))], [len(PROMPT) - 1] * len(made))
    commit = RULES[rule].verify(tree, p, noise)
    assert not commit.failed
    generator = np.random.default_rng(0)
    counts: dict[tuple[int, ...], int] = {}
    goes_on = {text[:size] for text in compute_expected() for size in range(len(text))}
    for tokens in commit.tokens:
        text = tuple(tokens[:LENGTH])
        text = text[: text.index(END) + 1] if END in text else text
        while text in goes_on and len(text) < LENGTH:
            text = (*text, int(generator.choice(V, p=compute_probs(text).numpy())))
        counts[text] = counts.get(text, 0) + 1
    accepted = sum(len(tokens) - 1 for tokens in commit.tokens)
    assert accepted > len(made) // 5
    return counts


def p_value(name: str, verified_by: GrammarMatcher | None = None) -> float:
    """Compute the p-value; zero if a text came out that the grammar forbids."""
    counts = texts(name, drafts(name, STEPS, matcher()), verified_by or matcher())
    wanted = compute_expected()
    if not set(counts) <= set(wanted):
        return 0.0
    keys = sorted(wanted)
    return chi_square(np.array([counts.get(key, 0) for key in keys]), np.array([wanted[key] for key in keys]))


@pytest.mark.parametrize("name", PLANS)
def test_a_step_has_the_distribution_of_the_target_under_the_grammar(name):
    assert p_value(name) > ALPHA


def test_the_draft_keeps_to_the_grammar_too():
    """Nothing forbidden is drafted, so nothing is drafted in vain for the grammar's sake."""
    wanted = compute_expected()
    for g in drafts("tree", 200, matcher()):
        for node in range(1, len(g.depths)):
            path = tuple(g.collect_path(node))
            assert any(text[: len(path)] == path for text in wanted)


@pytest.mark.parametrize("name", ["chain", "tree", "chain, block"])
def test_drafts_that_do_not_keep_to_it_cost_speed_alone(name):
    """A draft under no mask at all: its q is over every token, and the distribution is the same."""
    free = replace(SAMPLING, grammar=None)
    rule, plan = PLANS[name]
    unbound = requests(STEPS, rule, matcher())
    for request in unbound:
        change_spec(request, sampling=free, eos_ids=frozenset())
    growths = [TreeBuilder(request, plan) for request in unbound]
    while growing := [g for g in growths if g.frontier]:
        add_level(
            growing,
            NodeLogits(logits(1)[[ROW[tuple(g.collect_path(node))] for g in growing for node in g.frontier]], V),
        )
    counts, wanted = texts(name, growths, matcher()), compute_expected()
    assert set(counts) <= set(wanted)
    keys = sorted(wanted)
    observed = np.array([counts.get(key, 0) for key in keys])
    assert chi_square(observed, np.array([wanted[key] for key in keys])) > ALPHA


# faults


class Moved(GrammarMatcher):
    """Matcher that returns the mask of another node than the requested one."""

    where: Callable[[Sequence[int]], Sequence[int]]

    def find_allowed(self, output: Sequence[int], draft_path: Sequence[int] = ()) -> AllowedTokens:
        return super().find_allowed(output, self.where(draft_path))


FAULTS: dict[str, Callable[[Sequence[int]], Sequence[int]]] = {
    "the mask of the root": lambda path: (),
    "the mask of the parent": lambda path: path[:-1],
    "the mask of a sibling's path": lambda path: (*path[:-1], 1) if path else path,
    "the first token is forgotten": lambda path: path[1:],
}


def make_moved_matcher(name: str) -> GrammarMatcher:
    cursor = matcher().cursor
    made = Moved(GrammarCursor(cursor.initial_matcher, cursor.tokens))
    made.where = FAULTS[name]
    return made


@pytest.mark.parametrize("name", FAULTS)
def test_the_distribution_kills_masks_of_another_position(name):
    assert p_value("tree", verified_by=make_moved_matcher(name)) < ALPHA
