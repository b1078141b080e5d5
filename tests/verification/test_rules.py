"""Rules as functions: exact distributions of every tree shape, and what a rule owes to its batch.

`invariants/test_exact_distribution.py` runs the same checker over every sampling parameter.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from foredraft.errors import ForedraftError
from foredraft.sampling import rng
from foredraft.sampling.params import Sampling
from foredraft.sampling.rng import NoiseStream
from foredraft.tree import TokenTree
from foredraft.verification.noise import NoiseTable
from foredraft.verification.registry import RULES, find_rule
from foredraft.verification.rules import TypicalAcceptance, combine_rules, make_typical_rule
from tests.support.statistical_checks import sample_from_mass, total_variation
from tests.support.step_scenarios import StepScenario, SystemUnderTest, compute_step_distribution

BOUND = 5e-5
V = 8

#      0        0          0           0             0
#      |        |        / | \        / \           / \
#      1        1       1  2  3      1   2         1   2
#               |                   / \            |   |
#               2                  3   4           3   4
SHAPES = {
    "one": ((-1, 0), 8),
    "two": ((-1, 0, 1), 6),
    "three": ((-1, 0, 1, 2), 4),
    "siblings": ((-1, 0, 0, 0), 6),
    "two levels": ((-1, 0, 0, 1, 1), 4),
    "two branches": ((-1, 0, 0, 1, 2), 4),
}
CHAINS = ("one", "two", "three")
MIXED = {  # kind -> nodes whose children are deterministic draft tokens
    "guessed root": frozenset({0}),
    "guessed leaves": frozenset({1, 2}),
    "all guessed": frozenset(range(5)),
}


def worlds(shape: str, count: int = 20, **more) -> list[StepScenario]:
    parents, size = SHAPES[shape]
    filters = [Sampling(), Sampling(top_p=0.8), Sampling(temperature=0.7, top_k=3)]
    kinds = ["near", "far", "far", "near", "equal", "disjoint", "one-hot"]
    return [
        StepScenario(seed=seed, size=size, parents=parents, q_kind=kinds[seed % 7], sampling=filters[seed % 3], **more)
        for seed in range(count)
    ]


@pytest.mark.parametrize("shape", CHAINS)
@pytest.mark.parametrize("name", ["reject", "block"])
def test_twenty_worlds_of_chains_keep_the_distribution(name, shape):
    """Guards the arithmetic of acceptance, residual and bonus: total variation at most 5e-5 by exact integration."""
    accepts = rejects = 0.0
    for world in worlds(shape, 20 if shape != "three" else 6):
        probs = compute_step_distribution(SystemUnderTest(RULES[name].verify), world, is_block=name == "block")
        assert total_variation(probs.joint, world.joint) < BOUND, world
        accepts, rejects = accepts + probs.accepts, rejects + probs.rejects
    assert accepts > 1
    assert rejects > 1


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("shape", ["siblings", "two levels", "two branches"])
def test_worlds_of_trees_keep_the_distribution_of_siblings_drawn_without_replacement(shape, part):
    """Guards the residual and the draft distribution between siblings, and the walk down the accepted one."""
    accepts = rejects = 0.0
    for world in worlds(shape, 20)[part::4]:
        probs = compute_step_distribution(SystemUnderTest(RULES["reject"].verify), world)
        assert total_variation(probs.joint, world.joint) < BOUND, world
        accepts, rejects = accepts + probs.accepts, rejects + probs.rejects
    assert accepts > 0
    assert rejects > 0


@pytest.mark.parametrize("kind", MIXED)
def test_guesses_and_draws_mix_in_one_tree(kind):
    """Guards rows of zeros used as a distribution, and distributions used as deterministic draft tokens."""
    accepts = 0.0
    for world in worlds("two levels", 20, deterministic_nodes=MIXED[kind]):
        probs = compute_step_distribution(SystemUnderTest(RULES["reject"].verify), world)
        assert total_variation(probs.joint, world.joint) < BOUND, world
        accepts += probs.accepts
    assert accepts > 0


def test_block_verification_accepts_no_less_and_sometimes_more_than_token_verification():
    """Theorem 3 of 2403.10444; with one drafted token, or q = p, the two are the same."""
    gained = 0.0
    for shape in CHAINS:
        for world in worlds(shape, 8 if shape != "three" else 3):
            reject = compute_step_distribution(SystemUnderTest(RULES["reject"].verify), world).mean_accepted
            system = SystemUnderTest(RULES["block"].verify)
            block = compute_step_distribution(system, world, is_block=True).mean_accepted
            assert block >= reject - 1e-8
            if shape == "one" or world.q_kind == "equal":
                assert block == pytest.approx(reject, abs=1e-8)
            gained += block - reject
    assert gained > 0.02


def test_one_drafted_token_is_accepted_as_often_as_the_distributions_overlap():
    for world in worlds("one", 10):
        p, q = world.target_probs[0], world.draft_probs[0].numpy()
        accepted = compute_step_distribution(SystemUnderTest(RULES["reject"].verify), world).mean_accepted
        assert accepted == pytest.approx(1 - total_variation(p, q), abs=1e-7)


def random_batch(b: int = 40, seed: int = 0, is_chain: bool = False) -> tuple[TokenTree, torch.Tensor, NoiseTable]:
    """Make a ragged batch, with q from which its tokens could have been sampled."""
    generator = torch.Generator().manual_seed(seed)
    tokens, parents = [], []
    for i in range(b):
        size = 1 + i % 5
        tokens.append([int(torch.randint(V, (), generator=generator)) for _ in range(size)])
        parents.append([-1, *(n - 1 if is_chain else i * n // 7 % n for n in range(1, size))])
    rows = sum(map(len, tokens))
    q = torch.rand(rows, V, generator=generator).double() + 0.05
    p = torch.rand(rows, V, generator=generator).double() ** 3
    tree = TokenTree.from_lists(tokens, parents, q / q.sum(-1, keepdim=True))
    noise = NoiseTable.from_seeds(tree, [(seed, i) for i in range(b)], list(range(b)))
    return tree, p / p.sum(-1, keepdim=True), noise


def rows_of(tree: TokenTree, requests) -> torch.Tensor:
    return torch.tensor([r for b in requests for r in range(*tree.row_offsets[b : b + 2])])


@pytest.mark.parametrize("name", RULES)
def test_a_request_is_verified_as_if_it_were_alone(name):
    """Guards one request's rows or uniforms read for another in a ragged batch."""
    tree, p, noise = random_batch(is_chain=name == "block")
    commit = RULES[name].verify(tree, p, noise)
    accepted = 0
    for b in range(len(tree.sizes)):
        rows = rows_of(tree, [b])
        alone = RULES[name].verify(tree.select([b]), p[rows], noise.select([b], rows))
        assert alone.tokens[0] == commit.tokens[b]
        assert alone.paths[0] == commit.paths[b]
        accepted += len(alone.paths[0]) - 1
    assert 0 < accepted < sum(tree.sizes) - len(tree.sizes)


@pytest.mark.parametrize("name", RULES)
def test_a_commit_is_a_path_of_the_tree_and_its_tokens(name):
    """Guards KV kept for one path and tokens emitted for another; at least one token for every request."""
    for seed in range(5):
        tree, p, noise = random_batch(seed=seed, is_chain=name == "block")
        commit = RULES[name].verify(tree, p, noise)
        assert not commit.failed
        assert min(commit.counts) >= 1
        for b, (path, tokens) in enumerate(zip(commit.paths, commit.tokens, strict=True)):
            assert path[0] == 0
            assert [tree.parents[b][n] for n in path[1:]] == path[:-1]
            assert [tree.tokens[b][n] for n in path[1:]] == tokens[:-1]
            assert all(0 <= x < V for x in tokens)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_pure(name):
    """Guards target rows zeroed in place before another reader, and hidden randomness."""
    tree, p, noise = random_batch(is_chain=name == "block")
    given = [tree.q, p, noise.keys, noise.accept_table, noise.sample_table]
    before, nodes = [x.clone() for x in given], tree.copy()
    first, second = RULES[name].verify(tree, p, noise), RULES[name].verify(tree, p, noise)
    assert (first.paths, first.tokens) == (second.paths, second.tokens)
    assert (tree.tokens, tree.parents) == (nodes.tokens, nodes.parents)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


@pytest.mark.parametrize("name", RULES)
def test_committed_tokens_before_the_root_are_kept_and_change_nothing_below(name):
    """Guards a prompt chunk and a draft verified in one pass."""
    tree, p, noise = random_batch(12, is_chain=name == "block")
    prefixes = [[5] * (b % 3) for b in range(12)]
    known = [[*row[1:], tree.tokens[b][0]] if row else [] for b, row in enumerate(prefixes)]
    grown = tree.prepend_committed(prefixes, known)
    moved = NoiseTable.from_seeds(grown, [(0, i) for i in range(12)], [b - len(prefixes[b]) for b in range(12)])
    assert torch.equal(moved.keys, noise.keys)
    plain, full = RULES[name].verify(tree, p, noise), RULES[name].verify(grown, p, moved)
    for b, prefix in enumerate(prefixes):
        shift = len(prefix)
        assert full.paths[b] == [*range(shift), *(n + shift for n in plain.paths[b])]
        assert full.tokens[b] == [*known[b], *plain.tokens[b]]


@pytest.mark.parametrize("name", RULES)
def test_a_chunk_whose_successors_are_all_known_is_kept_whole_without_a_distribution(name):
    tree = TokenTree.from_chains([[3], [7, 1]]).prepend_committed([[1, 2], []], committed_next=[[2, 3, 4], []])
    p = torch.full((2, V), 1 / V).double()
    noise = NoiseTable.from_seeds(tree, [(0, 0), (1, 0)], [0, 5])
    commit = RULES[name].verify(tree, p, noise)
    assert commit.paths[0] == [0, 1, 2]
    assert commit.tokens[0] == [2, 3, 4]
    assert commit.counts[1] >= 1


def test_match_gives_the_draw_after_every_node_and_walks_along_it():
    tree, p, noise = random_batch()
    commit = RULES["match"].verify(tree, p, noise)
    samples = rng.exponential_race(p, noise.keys).argmax(-1).tolist()
    for b, (path, tokens) in enumerate(zip(commit.paths, commit.tokens, strict=True)):
        assert tokens == [samples[tree.get_row(b, n)] for n in path]
        below = [tree.tokens[b][n] for n in tree.children[b][path[-1]]]
        assert tokens[-1] not in below


def test_greedy_distributions_need_no_keys():
    tree, p, noise = random_batch()
    hot = torch.zeros_like(p).scatter_(1, p.argmax(-1, keepdim=True), 1)
    by_noise = RULES["match"].verify(tree, hot, noise)
    without = RULES["match"].verify(tree, hot, replace(noise, keys=None))
    assert by_noise.tokens == without.tokens
    assert RULES["reject"].verify(replace(tree, q=None), hot, noise).tokens == without.tokens


def test_the_keys_of_the_targets_draws_know_the_position_alone():
    """Guards text that depends on where a step began. The other uniforms must depend on it, or two steps share them."""
    long = TokenTree.from_chains([[1, 2, 3, 4]])
    early, late = NoiseTable.from_seeds(long, [(9, 0)], [10]), NoiseTable.from_seeds(long, [(9, 0)], [11])
    assert early.keys[1:].tolist() == late.keys[:-1].tolist()
    assert early.keys.tolist() == [rng.derive_key(9, 0, NoiseStream.TOKEN, position) for position in (11, 12, 13, 14)]
    tree = TokenTree.from_lists([[1, 2, 3, 4]], [[-1, 0, 0, 1]])
    assert NoiseTable.from_seeds(tree, [(9, 0)], [10]).keys.tolist() == early.keys[[0, 1, 1, 2]].tolist()
    numbers = [
        *early.accept_table[0].tolist(),
        *early.sample_table[0].tolist(),
        *late.accept_table[0].tolist(),
        *late.sample_table[0].tolist(),
    ]
    assert len(set(numbers)) == 16
    assert all(0 < u < 1 for u in numbers)
    other = NoiseTable.from_seeds(long, [(9, 1)], [10])
    assert not set(other.accept_table[0].tolist()) & set(numbers)


def test_a_batch_of_requests_that_asked_for_different_rules_gives_each_its_own():
    """Guards a chain under `block` beside a tree under `reject`: the one once refused the other."""
    tree, p, noise = random_batch()
    chains = [parents == list(range(-1, len(parents) - 1)) for parents in tree.parents]
    others = ["reject", "match", "typical", "spectr"]
    names = ["block" if is_chain and b % 2 else others[b % 4] for b, is_chain in enumerate(chains)]
    assert set(names) == set(RULES)
    broken = names.index("match")
    p[tree.get_row(broken, 0)] = torch.nan
    commit = combine_rules([RULES[name] for name in names])(tree, p, noise)
    assert commit.failed == {broken}
    for b, name in enumerate(names):
        rows = rows_of(tree, [b])
        alone = RULES[name].verify(tree.select([b]), p[rows], noise.select([b], rows))
        assert alone.tokens[0] == commit.tokens[b]
        assert alone.paths[0] == commit.paths[b]
    assert combine_rules([RULES["match"]] * 3) is RULES["match"].verify


def test_a_batch_with_every_rule_and_three_settings_of_one_equals_each_request_alone():
    tree, p, noise = random_batch(is_chain=True)
    rules = [*RULES.values(), make_typical_rule(0.9, 1.0), make_typical_rule(1e-9, 1e-9)]
    chosen = [rules[b * 5 // 7 % len(rules)] for b in range(len(tree.sizes))]
    commit = combine_rules(chosen)(tree, p, noise)
    accepted = Counter()
    for b, rule in enumerate(chosen):
        rows = rows_of(tree, [b])
        alone = rule.verify(tree.select([b]), p[rows], noise.select([b], rows))
        assert (alone.tokens[0], alone.paths[0]) == (commit.tokens[b], commit.paths[b])
        accepted[rule] += len(alone.paths[0]) - 1
    assert accepted[rules[-1]] > accepted[rules[-2]], "the two settings accept alike"
    assert all(rule in chosen for rule in rules)


def test_rules_of_equal_settings_verify_in_one_call():
    """Guards a call per request of a server, where every request makes its own rule."""
    tree, p, noise = random_batch(6)
    equal = [make_typical_rule(0.2, 0.4) for _ in range(6)]
    assert combine_rules(equal) is equal[0].verify
    calls = []

    @dataclass(frozen=True)
    class Counted(TypicalAcceptance):
        def __call__(self, tree, p, noise):
            calls.append(len(tree.sizes))
            return super().__call__(tree, p, noise)

    rules = [replace(RULES["typical"], verify=Counted(0.2 if b % 2 else 0.3)) for b in range(6)]
    combine_rules(rules)(tree, p, noise)
    assert calls == [3, 3]


@pytest.mark.parametrize(
    ("threshold", "alpha", "words"),
    [
        (0, 0.3, r"posterior_threshold must lie in \(0, 1\], got 0"),
        (1.5, 0.3, "posterior_threshold must"),
        (math.nan, 0.3, "posterior_threshold must"),
        ("0.2", 0.3, "posterior_threshold must"),
        (True, 0.3, "posterior_threshold must"),
        (0.1, 0.0, "posterior_alpha must be a finite number above 0, got 0.0"),
        (0.1, -1, "posterior_alpha must"),
        (0.1, math.inf, "posterior_alpha must"),
    ],
)
def test_settings_out_of_range_are_one_line(threshold, alpha, words):
    with pytest.raises(ForedraftError, match=words) as error:
        make_typical_rule(threshold, alpha)
    assert "\n" not in str(error.value)


def test_a_setting_of_another_rule_is_refused_by_name():
    assert find_rule("typical", {"posterior_alpha": 0.5}).verify == TypicalAcceptance(posterior_alpha=0.5)
    assert find_rule(make_typical_rule(0.5), {"posterior_alpha": 0.5}).verify == TypicalAcceptance(0.5, 0.5)
    assert find_rule("typical") is RULES["typical"]
    for verify in ("auto", "reject", RULES["block"]):
        with pytest.raises(ForedraftError, match="posterior_alpha is a setting of the rule typical, not of"):
            find_rule(verify, {"posterior_alpha": 0.5})
    with pytest.raises(ForedraftError, match="unknown verification rule 'typicl'; use one of auto, match"):
        find_rule("typicl", {"posterior_alpha": 0.5})


def test_block_verification_refuses_trees_and_says_what_to_do():
    tree = TokenTree.from_lists([[0, 1, 2]], [[-1, 0, 0]])
    with pytest.raises(ValueError, match="verify='reject'"):
        RULES["block"].verify(tree, torch.full((3, V), 1 / V), NoiseTable.from_seeds(tree, [(0, 0)], [0]))


def test_lossy_rules_are_named():
    assert [name for name, rule in RULES.items() if not rule.is_lossless] == ["typical"]


def test_typical_acceptance_keeps_what_is_likely_enough_and_the_longest_path():
    """Section 2.3.1 of 2401.10774: p(x) above min(eps, delta exp(-H))."""
    p = torch.tensor([[0.5, 0.3, 0.2, 0, 0, 0, 0, 0]]).double().expand(4, -1)
    entropy = -sum(x * torch.tensor(x).double().log().item() for x in (0.5, 0.3, 0.2))
    bar = 2.718281828459045**-entropy
    tree = TokenTree.from_lists([[0, 0, 1, 2]], [[-1, 0, 0, 2]])
    noise = NoiseTable.from_seeds(tree, [(0, 0)], [0])
    assert TypicalAcceptance(1.0, 0.19 / bar)(tree, p, noise).paths == [[0, 2, 3]]
    assert TypicalAcceptance(1.0, 0.25 / bar)(tree, p, noise).paths == [[0, 1]]
    assert TypicalAcceptance(1.0, 0.55 / bar)(tree, p, noise).paths == [[0]]
    assert TypicalAcceptance(0.25, 99)(tree, p, noise).paths == [[0, 1]]


def typical_of_the_authors(tree, b, p):
    """`evaluate_posterior` of Medusa with the values that `medusa_generate` gives it, over paths from root to leaf, and
    the argmax after the path. Paths are not padded."""
    tokens, parents = tree.tokens[b], tree.parents[b]
    best = ([0], 0.0)
    for node in range(len(tokens)):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        length, likelihood = 0, 0.0
        for above, below in pairwise(path):
            probs = p[tree.get_row(b, above)]
            entropy = -(probs * (probs + 1e-5).log()).sum()
            if probs[tokens[below]] <= min(0.09, 0.3 * float((-entropy).exp())):
                break
            length, likelihood = length + 1, likelihood + float(probs[tokens[below]].log())
        if (length, likelihood) > (len(best[0]) - 1, best[1]):
            best = (path[: length + 1], likelihood)
    path = best[0]
    return path, [*(tokens[n] for n in path[1:]), int(p[tree.get_row(b, path[-1])].argmax())]


def test_typical_acceptance_is_that_of_its_authors_generate():
    """Guards threshold 0.3 and alpha 0.09, default arguments that their loop never uses, the first of several longest
    paths in place of the likeliest, and a sampled token after the path in place of the target's argmax."""
    generator = torch.Generator().manual_seed(3)
    parents = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 4, 6]
    several = 0
    for _ in range(60):
        tokens = [0]
        for node in range(1, len(parents)):  # siblings differ
            taken = {tokens[i] for i in range(1, node) if parents[i] == parents[node]}
            free = [x for x in range(V) if x not in taken]
            tokens.append(free[int(torch.randint(len(free), (), generator=generator))])
        tree = TokenTree.from_lists([tokens], [parents])
        p = (1.2 * torch.randn(len(parents), V, generator=generator).double()).softmax(-1)
        commit = TypicalAcceptance()(tree, p, NoiseTable.from_seeds(tree, [(1, 0)], [5]))
        path, following = typical_of_the_authors(tree, 0, p)
        assert (commit.paths[0], commit.tokens[0]) == (path, following)
        several += len(path) > 2
    assert several > 10
    noise = NoiseTable(None, torch.full((1, len(parents)), 0.5), torch.full((1, len(parents)), 0.999))
    sampled = TypicalAcceptance(samples_last=True)(tree, p, noise)
    assert sampled.paths == commit.paths
    assert sampled.tokens[0][-1] == sample_from_mass(p[tree.get_row(0, path[-1])], 0.999) != following[-1]


@pytest.mark.parametrize(
    ("probs", "u", "token"),
    [
        ([0.25, 0.25, 0.5], 0.2, 0),
        ([0.25, 0.25, 0.5], 0.25, 1),
        ([0.25, 0.25, 0.5], 0.4999, 1),
        ([0.25, 0.25, 0.5], 1 - 2**-53, 2),
        ([0.0, 1.0, 0.0], 2**-53, 1),
        ([0.0, 1.0, 0.0], 1 - 2**-53, 1),
        ([0.5, 0.0, 0.5], 0.5, 2),
        ([0.5, 0.5, 1e-30], 1 - 2**-53, 1),
        ([1e-300, 1e-300], 0.6, 1),
        ([2.0, 6.0], 0.2, 0),
    ],
)
def test_a_draw_is_the_first_token_whose_cumulative_probability_exceeds_the_uniform(probs, u, token):
    assert sample_from_mass(torch.tensor(probs, dtype=torch.float64), u) == token
