from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.drafters.draft import Draft
from foredraft.tree import Commit, TokenTree

#          0                 0
#        /   \               |
#       1     2              1
#      / \     \
#     3   4     5
RAGGED = TokenTree.from_lists(
    [[9, 1, 2, 3, 4, 5], [7, 8]], [[-1, 0, 0, 1, 1, 2], [-1, 0]], torch.arange(8 * 10).view(8, 10).double()
)


@st.composite
def batches(draw, min_size=1):
    """Lists of (tokens, parents) of random trees."""
    trees = []
    for _ in range(draw(st.integers(min_size, 4))):
        size = draw(st.integers(1, 7))
        tokens = draw(st.lists(st.integers(0, 30), min_size=size, max_size=size))
        trees.append((tokens, [-1, *(draw(st.integers(0, n - 1)) for n in range(1, size))]))
    return trees


def tree_of(trees) -> TokenTree:
    return TokenTree.from_lists([t for t, _ in trees], [p for _, p in trees])


def test_a_ragged_batch_knows_its_shape():
    assert RAGGED.sizes == [6, 2]
    assert RAGGED.tokens == [[9, 1, 2, 3, 4, 5], [7, 8]]
    assert RAGGED.parents == [[-1, 0, 0, 1, 1, 2], [-1, 0]]
    assert RAGGED.roots == [0, 0]
    assert RAGGED.children == [[[1, 2], [3, 4], [5], [], [], []], [[1], []]]
    assert RAGGED.depths == [[0, 1, 1, 2, 2, 2], [0, 1]]
    assert RAGGED.row_offsets == [0, 6, 8]
    assert RAGGED.get_row(1, 1) == 7
    assert not RAGGED.is_chain


def test_chains_are_trees_whose_every_parent_is_the_node_before():
    chain = TokenTree.from_chains([[5, 6, 7], [8]])
    assert chain.parents == [[-1, 0, 1], [-1]]
    assert chain.is_chain
    assert TokenTree.from_lists([[5, 6]], [[-1, 0]]).is_chain
    assert not TokenTree.from_lists([[5, 6, 7]], [[-1, 0, 0]]).is_chain
    assert not TokenTree.from_lists([[5], [5, 6, 7]], [[-1], [-1, 0, 0]]).is_chain


def test_ancestors_are_the_path_to_the_root_and_the_node_itself():
    """Guards a tree attention mask that lets a node see its uncle."""
    mask = RAGGED.build_ancestor_mask(0)
    assert [row.nonzero()[:, 0].tolist() for row in mask] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]


def test_a_path_lists_the_drafted_tokens_from_below_the_root():
    assert [RAGGED.get_draft_path(0, n) for n in range(6)] == [[], [1], [2], [1, 3], [1, 4], [2, 5]]


def test_committed_tokens_put_before_the_root_shift_the_tree_and_score_no_rows():
    """Guards a prompt chunk and a draft in one pass: rows of p and q start at the last committed token."""
    grown = RAGGED.prepend_committed([[20, 21], []], committed_next=[[21, 9], []])
    assert grown.tokens == [[20, 21, 9, 1, 2, 3, 4, 5], [7, 8]]
    assert grown.parents == [[-1, 0, 1, 2, 2, 3, 3, 4], [-1, 0]]
    assert grown.roots == [2, 0]
    assert grown.row_offsets == RAGGED.row_offsets
    assert grown.get_row(0, 3) == RAGGED.get_row(0, 1)
    assert grown.children[0] == [[], [], [3, 4], [5, 6], [7], [], [], []]
    assert grown.get_draft_path(0, 5) == [1, 3]
    assert grown.depths[0] == [0, 1, 2, 3, 3, 4, 4, 4]
    assert grown.q is RAGGED.q


def test_a_chunk_that_ends_before_the_last_token_has_no_rows_at_all():
    """Guards a middle chunk of a prompt: the successor of every node is known, so nothing is scored."""
    tree = TokenTree.from_chains([[3], [7, 8]]).prepend_committed([[1, 2], [5]], committed_next=[[2, 3, 4], [7]])
    assert tree.roots == [3, 1]
    assert tree.sizes == [3, 3]
    assert tree.row_offsets == [0, 0, 2]
    assert tree.children[0] == [[], [], []]


def test_a_tree_after_nothing_is_the_tree():
    grown = RAGGED.prepend_committed([[], []], committed_next=[[], []])
    assert grown.tokens == RAGGED.tokens
    assert grown.parents == RAGGED.parents
    assert grown.roots == RAGGED.roots
    assert grown.is_chain == RAGGED.is_chain


@given(batches())
def test_the_parts_of_any_tree_agree_with_walking_it_upwards(trees):
    """Guards depth, ancestors, children, paths and rows against one slow walk along the parents."""
    tree = tree_of(trees)
    row = 0
    for b, (tokens, parents) in enumerate(trees):
        mask = tree.build_ancestor_mask(b)
        assert mask.shape == (len(tokens), len(tokens))
        for node in range(len(tokens)):
            above = [node]
            while parents[above[-1]] >= 0:
                above.append(parents[above[-1]])
            assert tree.depths[b][node] == len(above) - 1
            assert mask[node].nonzero()[:, 0].tolist() == sorted(above)
            assert tree.get_draft_path(b, node) == [tokens[n] for n in above[-2::-1]]
            assert tree.children[b][node] == [n for n, parent in enumerate(parents) if parent == node]
            assert tree.get_row(b, node) == row
            row += 1
    assert tree.row_offsets[-1] == row
    assert tree.is_chain == all(p == list(range(-1, len(p) - 1)) for _, p in trees)


@given(batches(), st.data())
def test_growing_a_tree_keeps_everything_below_the_root(trees, data):
    """Guards prompt chunks of any length put before any tree."""
    tree = tree_of(trees)
    prefixes = [data.draw(st.lists(st.integers(0, 30), max_size=4)) for _ in trees]
    known = [[*prefix[1:], tree.tokens[b][0]] if prefix else [] for b, prefix in enumerate(prefixes)]
    grown = tree.prepend_committed(prefixes, known)
    assert grown.row_offsets == tree.row_offsets
    for b, prefix in enumerate(prefixes):
        shift = len(prefix)
        assert grown.sizes[b] == tree.sizes[b] + shift
        assert grown.roots[b] == shift
        assert grown.parents[b][0] == -1
        assert all(parent < node for node, parent in enumerate(grown.parents[b]))
        for node in range(tree.sizes[b]):
            assert grown.get_draft_path(b, node + shift) == tree.get_draft_path(b, node)
            assert grown.get_row(b, node + shift) == tree.get_row(b, node)
            assert grown.children[b][node + shift] == [n + shift for n in tree.children[b][node]]
            assert grown.depths[b][node + shift] == tree.depths[b][node] + shift
        assert torch.equal(grown.build_ancestor_mask(b)[shift:, shift:], tree.build_ancestor_mask(b))
        assert grown.build_ancestor_mask(b)[shift:, :shift].all()
        assert torch.equal(grown.build_ancestor_mask(b)[:shift, :shift], torch.ones(shift, shift).tril().bool())


@given(batches(), st.data())
def test_selected_requests_keep_their_trees_and_rows(trees, data):
    """Guards a batch whose requests verify by different rules: each rule must see the right rows of q."""
    size = sum(len(t) for t, _ in trees)
    tree = TokenTree.from_lists([t for t, _ in trees], [p for _, p in trees], torch.arange(size)[:, None].double())
    mine = data.draw(st.lists(st.integers(0, len(trees) - 1), min_size=1, max_size=4, unique=True))
    chosen = tree.select(mine)
    for i, b in enumerate(mine):
        assert chosen.tokens[i] == tree.tokens[b]
        assert chosen.parents[i] == tree.parents[b]
        assert chosen.roots[i] == tree.roots[b]
        rows = [chosen.q[chosen.get_row(i, n)].item() for n in range(tree.sizes[b])]
        assert rows == [tree.get_row(b, n) for n in range(tree.sizes[b])]


def test_a_commit_counts_what_it_keeps():
    commit = Commit.from_lists([[0, 2, 5], [0], []], [[4, 5, 6], [8], []], failed=frozenset({2}))
    assert commit.counts == [3, 1, 0]
    assert commit.tokens == [[4, 5, 6], [8], []]
    assert commit.paths == [[0, 2, 5], [0], []]
    assert commit.failed == {2}


def test_a_commit_of_nothing_keeps_nothing():
    commit = Commit.from_lists([[], []], [[], []])
    assert commit.counts == [0, 0]
    assert commit.truncate([0, 0]) == commit


def test_cutting_a_commit_cuts_path_tokens_and_features_alike():
    """Guards KV kept beyond a stop: after the cut, entries kept and tokens emitted are the same number."""
    features = torch.randn(2, 3, 4)
    commit = Commit.from_lists([[0, 1, 2], [0, 1]], [[4, 5, 6], [8, 9]], features=features)
    cut = commit.truncate([2, 1])
    assert cut.paths == [[0, 1], [0]]
    assert cut.tokens == [[4, 5], [8]]
    assert cut.counts == [2, 1]
    assert torch.equal(cut.features[0], features[0, :2])
    assert torch.equal(cut.features[1, :1], features[1, :1])
    assert cut.features.shape == (2, 2, 4)
    assert commit.counts == [3, 2]


@pytest.mark.parametrize("counts", [[3, 2], [9, 9]])
def test_a_cut_that_asks_for_more_than_there_is_changes_nothing(counts):
    commit = Commit.from_lists([[0, 1, 2], [0, 1]], [[4, 5, 6], [8, 9]])
    cut = commit.truncate(counts)
    assert cut.tokens == commit.tokens
    assert cut.paths == commit.paths


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=4), st.data())
def test_a_cut_is_a_prefix_and_cutting_twice_is_cutting_once(rows, data):
    commit = Commit.from_lists([range(len(row)) for row in rows], rows, failed=frozenset({0}))
    counts = [data.draw(st.integers(0, 6)) for _ in rows]
    cut = commit.truncate(counts)
    assert cut.tokens == [row[:n] for row, n in zip(rows, counts, strict=True)]
    assert cut.paths == [list(range(len(row)))[:n] for row, n in zip(rows, counts, strict=True)]
    assert cut.failed == commit.failed
    assert cut.truncate(counts) == cut


@given(batches())
def test_a_row_is_found_again_from_its_node(trees):
    """Guards a token history of another request's row."""
    tree = tree_of(trees)
    places = [(b, n) for b, (tokens, _) in enumerate(trees) for n in range(len(tokens))]
    assert [tree.locate_row(row) for row in range(tree.row_offsets[-1])] == places


@given(batches())
def test_a_copy_shares_no_list(trees):
    """Guards a drafter that changes its own tree after the sandbox has validated it."""
    tree = tree_of(trees)
    copy = tree.copy()
    for row in (*tree.tokens, *tree.parents):
        row.append(-7)
    assert (copy.tokens, copy.parents) == ([t for t, _ in trees], [p for _, p in trees])


def test_node_numbers_of_any_integer_type_are_integers_and_others_are_refused():
    """Guards ids of numpy that reach the text, and fractions cut off in silence."""
    tree = TokenTree.from_lists([list(torch.tensor([3, 4]).numpy())], [[-1, 0]])
    assert all(type(token) is int for token in tree.tokens[0])
    with pytest.raises(TypeError):
        TokenTree.from_lists([[3.5]], [[-1]])


def test_confidences_stay_with_their_requests():
    tree = replace(TokenTree.from_chains([[1, 2, 3], [4], [5, 6]]), confidences={0: (0.9, 0.5), 2: (0.25,)})
    assert tree.copy().confidences == tree.confidences
    assert tree.select([2, 1]).confidences == {0: (0.25,)}
    grown = tree.prepend_committed([[7], [], [8, 9]], committed_next=[[1], [], [9, 5]])
    assert grown.confidences == tree.confidences
    assert Draft((1, 2, 3), (0, 1, 2), confidences=(0.9, 0.5, 0.1)).limit_depth(2).confidences == (0.9, 0.5)
