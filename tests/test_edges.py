import math

import pytest
import torch

from foredraft.tree import TokenTree
from foredraft.verification.noise import NoiseTable
from foredraft.verification.registry import RULES
from tests.support.edge_cases import EDGES, EVEN, PAIRS, V, find_impossible_tokens, make_batch

CASES = [(name, edge) for name in RULES for edge in EDGES if not (name == "block" and edge.shape == "siblings")]


@pytest.mark.parametrize(("name", "edge"), CASES, ids=str)
def test_no_uniform_makes_a_rule_emit_what_the_target_cannot(name, edge):
    """Guards a non-strict comparison, a sample past the end, 0 / 0, an empty residual and padding ids.

    125 choices of extreme uniforms each: the ends of the open interval, and zero itself, which no uniform should be.
    """
    assert list(find_impossible_tokens(RULES[name].verify, edge)) == []


def test_there_are_enough_directed_cases():
    assert len(CASES) >= 200


@pytest.mark.parametrize("pair", ["p = q", "support of one, drafted", "zero residual", "both tiny", "q unnormalised"])
@pytest.mark.parametrize("name", ["reject", "block", "spectr"])
def test_a_draft_from_the_targets_own_distribution_is_accepted_at_every_uniform(name, pair):
    """Guards p / q rounded below one. Of the last pair, q is far from p, so that the test is not empty."""
    edge = next(edge for edge in EDGES if edge.pair == pair and edge.shape == "chain")
    tree, p, noise = make_batch(edge)
    if pair == "support of one, drafted":
        tree = TokenTree.from_chains([[0, 1, 1]] * len(tree.sizes), tree.q)
    if pair == "both tiny":
        noise.accept_table.clamp_(max=0.4)  # of a number this small, most of it times a uniform is all of it
    commit = RULES[name].verify(tree, p, noise)
    accepts_all = set(commit.counts) == {3}
    assert accepts_all == (pair != "q unnormalised")


FAULTS = {
    "NaN": math.nan,
    "+inf": math.inf,
    "-inf": -math.inf,
    "no mass": 0.0,
}


def chains(count: int = 5, seed: int = 0) -> tuple[TokenTree, torch.Tensor, NoiseTable]:
    """Requests that accept every drafted token, so that every row is reached."""
    p = torch.full((count * 3, V), 1e-9, dtype=torch.float64)
    tree = TokenTree.from_chains([[0, 1, 2]] * count, EVEN.expand(count * 3, -1).clone())
    p[0::3, 1] = p[1::3, 2] = p[2::3, 3] = 1
    return tree, p, NoiseTable.from_seeds(tree, [(seed, b) for b in range(count)], [4] * count)


def spoil(row: torch.Tensor, fault: str, is_whole: bool) -> None:
    if is_whole or fault == "no mass":
        row.fill_(FAULTS[fault])
    else:
        row[4] = FAULTS[fault]


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole row", "one id"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("node", [0, 1, 2])
@pytest.mark.parametrize("name", RULES)
def test_a_target_row_that_is_no_distribution_fails_its_request_alone(name, node, fault, is_whole):
    """Guards NaN logits that become token 0, the vocabulary size, or somebody else's trouble. Below the root the walk
    ends before such a row: what leads there is committed, as it is without a draft."""
    tree, p, noise = chains()
    clean = RULES[name].verify(tree, p, noise)
    assert set(clean.counts) == {3}
    spoil(p[tree.get_row(2, node)], fault, is_whole)
    commit = RULES[name].verify(tree, p, noise)
    assert commit.failed == ({2} if node == 0 else set())
    assert commit.tokens[2] == clean.tokens[2][:node]
    assert commit.paths[2] == clean.paths[2][:node]
    for b in (0, 1, 3, 4):
        assert commit.tokens[b] == clean.tokens[b]
        assert commit.paths[b] == clean.paths[b]


@pytest.mark.parametrize("name", RULES)
def test_a_row_that_is_never_reached_may_be_anything(name):
    """Guards a request that failed because a forbidden draft token (a grammar's dead end) has no distribution."""
    tree, p, noise = chains()
    p[tree.get_row(2, 0), 1] = 0
    p[tree.get_row(2, 1)] = math.nan
    commit = RULES[name].verify(tree, p, noise)
    assert not commit.failed
    assert commit.counts[2] == 1
    assert commit.counts[1] == 3


Q_FAULTS = {
    "NaN": lambda q: q.fill_(math.nan),
    "one NaN": lambda q: q.index_fill_(0, torch.tensor([4]), math.nan),
    "+inf": lambda q: q.fill_(math.inf),
    "one +inf": lambda q: q.index_fill_(0, torch.tensor([4]), math.inf),
    "-inf": lambda q: q.fill_(-math.inf),
    "negative": lambda q: q.index_fill_(0, torch.tensor([4]), -0.5),
    "cancelling": lambda q: q.copy_(torch.tensor([0, 1.0, 1.0, -2.0, 0, 0, 0, 0])),
    "could not have drawn it": lambda q: q.index_fill_(0, torch.tensor([1, 2]), 0),
}


@pytest.mark.parametrize("fault", Q_FAULTS)
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("name", ["reject", "block", "spectr"])
def test_a_draft_row_that_is_no_distribution_is_no_draft(name, node, fault):
    """Guards a NaN of the drafter that reaches the text: nodes below it are ignored, and the sample comes from p."""
    tree, p, noise = chains()
    Q_FAULTS[fault](tree.q[tree.get_row(2, node)])
    commit = RULES[name].verify(tree, p, noise)
    short = TokenTree.from_chains([[0, 1, 2][: node + 1] if b == 2 else [0, 1, 2] for b in range(5)], None)
    rows = [r for r in range(15) if not 6 + node < r < 9]
    expected = RULES[name].verify(TokenTree(short.tokens, short.parents, tree.q[rows]), p[rows], noise)
    assert not commit.failed
    assert commit.tokens == expected.tokens
    assert commit.paths == expected.paths
    assert commit.counts == [3, 3, node + 1, 3, 3]


@pytest.mark.parametrize("name", [name for name in RULES if name != "block"])
@pytest.mark.parametrize("fault", Q_FAULTS)
def test_siblings_below_a_draft_row_that_is_no_distribution_draw_from_the_target(name, fault):
    """Guards a second sibling verified against the NaN residual of the first."""
    q = EVEN.expand(3, -1).clone()
    Q_FAULTS[fault](q[0])
    tree = TokenTree.from_lists([[0, 1, 2]], [[-1, 0, 0]], q)
    p = EVEN.expand(3, -1)
    for u in (0.01, 0.3, 0.6, 0.99):
        noise = NoiseTable(torch.tensor([7, 8, 9]), torch.full((1, 3), 0.5).double(), torch.full((1, 3), u).double())
        commit = RULES[name].verify(tree, p, noise)
        assert not commit.failed
        if name in ("reject", "spectr"):
            assert commit.tokens == [[int(u * 6)]]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("token", [V, V + 1, 10**9])
@pytest.mark.parametrize("has_q", [True, False], ids=["drawn", "guessed"])
def test_a_drafted_id_outside_the_vocabulary_is_no_draft(name, token, has_q):
    """Guards an index error, or worse an emitted id, if draft and target disagree about the vocabulary."""
    p = EVEN.expand(4, -1)
    q = torch.full((4, V + 2), 1 / (V + 2)).double() if has_q else None
    tree = TokenTree.from_chains([[0, token], [0, 3]], q)
    commit = RULES[name].verify(tree, p, NoiseTable.from_seeds(tree, [(0, 0), (1, 0)], [0, 0]))
    assert not commit.failed
    assert commit.counts[0] == 1
    assert all(0 <= x < V for row in commit.tokens for x in row)


@pytest.mark.parametrize("name", RULES)
def test_padding_ids_are_never_emitted_however_much_the_draft_likes_them(name):
    q = torch.full((200, V), 1e-3).double()
    q[:, 6:] = 0.5
    tree = TokenTree.from_chains([[0, 6 + b % 2] for b in range(100)], q)
    commit = RULES[name].verify(
        tree, EVEN.expand(200, -1), NoiseTable.from_seeds(tree, [(b, 0) for b in range(100)], [0] * 100)
    )
    assert commit.counts == [1] * 100
    assert {x for row in commit.tokens for x in row} <= set(range(6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("pair", sorted(set(PAIRS) - {"p = q in single precision"}))
def test_distributions_in_single_precision_are_verified_in_double(pair, dtype):
    """Guards a residual of rounding errors: the uniforms have 53 bits, the arithmetic must too."""
    p, q = PAIRS[pair]
    rows = None if q is None else q.expand(3, -1).to(dtype)
    tree = TokenTree.from_chains([[0, 1, 2]], rows)
    commit = RULES["reject"].verify(tree, p.expand(3, -1).to(dtype), NoiseTable.from_seeds(tree, [(3, 0)], [0]))
    assert not commit.failed
    assert all(p[x] > 0 for x in commit.tokens[0])
