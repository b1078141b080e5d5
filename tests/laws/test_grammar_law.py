"""The law of texts under a grammar: what the target's own law is once every forbidden token is taken out of each row.

Many steps at once over trees drawn from a draft's law, counted against enumeration. Guards against masks of another
position (the root's, the parent's, a sibling's), each of them seeded here and caught, and drafts that were made under
another mask than the target's.
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

from foredraft.drafters.growth import Growth, Plan, Scores, extend
from foredraft.grammar import Allowed, Grammar, Matcher
from foredraft.request import Request
from foredraft.sampling import Sampling, distribution
from foredraft.tree import TokenTree
from foredraft.verify import RULES, Keyed
from grammars_made import END, NINE, grammars
from stats import ALPHA, chi_square

V, LENGTH = len(NINE), 3
PROMPT = [1, 2]
GRAMMAR = Grammar.regex("(a|b|ab|bc)*(c|[{]a*[}])+")
SAMPLING = Sampling(temperature=0.9, max_tokens=50, grammar=GRAMMAR)
STEPS = 2500
CONTEXTS = [c for n in range(LENGTH + 1) for c in itertools.product(range(V), repeat=n)]
ROW = {context: row for row, context in enumerate(CONTEXTS)}
PLANS = {
    "chain": ("reject", Plan.of(LENGTH)),
    "tree": ("reject", Plan.of(LENGTH, tree_nodes=7, top_k=3)),
    "fixed tree": ("reject", Plan.of(LENGTH, branching=(3, 2, 1))),
    "chain, block": ("block", Plan.of(LENGTH)),
}


@cache
def logits(stream: int) -> Tensor:
    """[contexts, V] of the target (0) or the draft (1), which is far from it."""
    generator = torch.Generator().manual_seed(stream)
    return 1.3 * torch.randn(len(CONTEXTS), V, generator=generator, dtype=torch.float64)


def matcher() -> Matcher:
    return grammars().matcher(GRAMMAR, (END,))


def requests(count: int, rule: str, follow: Matcher) -> list[Request]:
    """They share a matcher, for all of them stand after the same output."""
    return [
        Request(0, PROMPT, SAMPLING, seed, eos_ids=frozenset({END}), verify=rule, matcher=follow)
        for seed in range(count)
    ]


def law(text: Sequence[int]) -> Tensor:
    """[V] by hand: the target's softmax over what the grammar allows, from a matcher that saw nothing else."""
    mask = matcher().after(list(text)).mask
    assert mask is not None
    p = (logits(0)[ROW[tuple(text)]] / SAMPLING.temperature).softmax(-1) * mask
    return p / p.sum()


@cache
def expected() -> dict[tuple[int, ...], float]:
    """Every text of LENGTH tokens, or shorter with its end."""
    found: dict[tuple[int, ...], float] = {}
    grown: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while grown:
        text, chance = grown.pop()
        if len(text) == LENGTH or END in text:
            found[text] = chance
        else:
            grown += [((*text, token), chance * float(p)) for token, p in enumerate(law(text)) if p > 0]
    assert math.isclose(sum(found.values()), 1)
    return found


def drafts(name: str, count: int, follow: Matcher) -> list[Growth]:
    rule, plan = PLANS[name]
    growths = [Growth(request, plan) for request in requests(count, rule, follow)]
    while growing := [g for g in growths if g.frontier]:
        rows = [ROW[tuple(g.path(node))] for g in growing for node in g.frontier]
        extend(growing, Scores(logits(1)[rows], V))
    return growths


def texts(name: str, growths: Sequence[Growth], verified_by: Matcher) -> dict[tuple[int, ...], int]:
    """What came out of one step each, and of plain draws where that was shorter."""
    made = [g.draft() for g in growths]
    q = torch.cat([d.q for d in made if d.q is not None])
    tree = TokenTree.of([[PROMPT[-1], *d.tokens] for d in made], [[-1, *d.parents] for d in made], q)
    rule = PLANS[name][0]
    paths = [tuple(tree.path(b, node)) for b, size in enumerate(tree.sizes) for node in range(size)]
    shared = requests(1, rule, verified_by)[0]
    rows = {path: distribution(logits(0)[[ROW[path]]], SAMPLING, [shared.history(path)])[0] for path in set(paths)}
    p = torch.stack([rows[path] for path in paths])
    assert p.isfinite().all()
    commit = RULES[rule](tree, p, Keyed(tree, [(i, 0) for i in range(len(made))], [len(PROMPT) - 1] * len(made)))
    assert not commit.failed
    generator = np.random.default_rng(0)
    counts: dict[tuple[int, ...], int] = {}
    goes_on = {text[:size] for text in expected() for size in range(len(text))}
    for tokens in commit.token_lists:
        text = tuple(tokens[:LENGTH])
        text = text[: text.index(END) + 1] if END in text else text
        while text in goes_on and len(text) < LENGTH:
            text = (*text, int(generator.choice(V, p=law(text).numpy())))
        counts[text] = counts.get(text, 0) + 1
    accepted = sum(len(tokens) - 1 for tokens in commit.token_lists)
    assert accepted > len(made) // 5
    return counts


def p_value(name: str, verified_by: Matcher | None = None) -> float:
    """Zero where a text came out that the grammar forbids."""
    counts = texts(name, drafts(name, STEPS, matcher()), verified_by or matcher())
    wanted = expected()
    if not set(counts) <= set(wanted):
        return 0.0
    keys = sorted(wanted)
    return chi_square(np.array([counts.get(key, 0) for key in keys]), np.array([wanted[key] for key in keys]))


@pytest.mark.parametrize("name", PLANS)
def test_a_step_has_the_law_of_the_target_under_the_grammar(name):
    assert p_value(name) > ALPHA


def test_the_draft_keeps_to_the_grammar_too():
    """Nothing forbidden is drafted, so nothing is drafted in vain for the grammar's sake."""
    wanted = expected()
    for g in drafts("tree", 200, matcher()):
        for node in range(1, len(g.depths)):
            path = tuple(g.path(node))
            assert any(text[: len(path)] == path for text in wanted)


@pytest.mark.parametrize("name", ["chain", "tree", "chain, block"])
def test_drafts_that_do_not_keep_to_it_cost_speed_alone(name):
    """A draft under no mask at all: its q is over every token, and the law is the same."""
    free = replace(SAMPLING, grammar=None)
    rule, plan = PLANS[name]
    growths = [Growth(replace(r, sampling=free, eos_ids=frozenset()), plan) for r in requests(STEPS, rule, matcher())]
    while growing := [g for g in growths if g.frontier]:
        extend(growing, Scores(logits(1)[[ROW[tuple(g.path(node))] for g in growing for node in g.frontier]], V))
    counts, wanted = texts(name, growths, matcher()), expected()
    assert set(counts) <= set(wanted)
    keys = sorted(wanted)
    observed = np.array([counts.get(key, 0) for key in keys])
    assert chi_square(observed, np.array([wanted[key] for key in keys])) > ALPHA


# faults


class Moved(Matcher):
    """Answers for another node than it is asked about."""

    where: Callable[[Sequence[int]], Sequence[int]]

    def after(self, output: Sequence[int], drafted: Sequence[int] = ()) -> Allowed:
        return super().after(output, self.where(drafted))


FAULTS: dict[str, Callable[[Sequence[int]], Sequence[int]]] = {
    "the mask of the root": lambda path: (),
    "the mask of the parent": lambda path: path[:-1],
    "the mask of a sibling's path": lambda path: (*path[:-1], 1) if path else path,
    "the first token is forgotten": lambda path: path[1:],
}


def moved(name: str) -> Matcher:
    plain = matcher()
    made = Moved(plain.start, plain.vocab_size, plain.num_known, plain.eos_ids, plain.end_ids)
    made.where = FAULTS[name]
    return made


@pytest.mark.parametrize("name", FAULTS)
def test_the_law_kills_masks_of_another_position(name):
    assert p_value("tree", verified_by=moved(name)) < ALPHA
