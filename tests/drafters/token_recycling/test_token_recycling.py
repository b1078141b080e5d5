"""Token recycling: the fixed tree, the matrix, and the drafts that they make.

Guards against a child before its parent, candidates of another token or of another step, and drafts over budget.
"""

import pytest

from foredraft import Sampling
from foredraft.drafters.method import DrafterContext
from foredraft.drafters.token_recycling import method as token_recycling
from foredraft.drafters.token_recycling.drafter import RankNode, build_rank_tree
from foredraft.errors import ForedraftError
from foredraft.request import Batch
from foredraft.tree import Commit, TargetCandidates, TokenTree
from foredraft.verification.rules import BLOCK
from tests.support.requests import make_request

VOCAB = 23


def make_drafter(num_tokens=3, **options):
    return token_recycling.create(
        token_recycling.Config(**options), DrafterContext(vocab_size=VOCAB, num_speculative_tokens=num_tokens)
    )


def request(tokens, **more):
    made = make_request(0, tokens, Sampling(max_tokens=1000), seed=1, **more)
    made.num_computed = made.num_tokens - 1
    return made


def observe(drafter, tree, rows):
    commit = Commit.from_lists([[0]], [[1]]).with_target_outputs(None, None, TargetCandidates(tree, rows))
    drafter.observe(Batch((request([1]),), (1,), (0,)), commit)


def test_tree_has_parents_first_and_respects_its_bounds():
    tree = build_rank_tree(40, 4, 3)
    assert len(tree) == len(set(tree)) == 40
    assert tree[0] == RankNode(0, 0, 1)
    for n, node in enumerate(tree, 1):
        assert node.parent < n
        assert node.rank < 4
        assert node.depth <= 3
        assert node.depth == (tree[node.parent - 1].depth + 1 if node.parent else 1)
    assert len(build_rank_tree(100, 2, 2)) == 6  # 2 children and 4 grandchildren


def test_candidates_of_every_scored_node_are_drafted_and_the_newest_replace_older_ones():
    drafter = make_drafter(num_tokens=2, top_k=2, nodes=6)
    r = request([7, 5])
    assert drafter.draft(r, 6).tokens == ()
    rejected = TokenTree([[5, 8, 9]], [[-1, 0, 0]])
    observe(drafter, rejected, ((8, 9), (1, 2), ()))  # the row after 9 was not finite
    draft = drafter.draft(r, 6)
    paths = {(t, draft.tokens[p - 1] if p else 5) for t, p in zip(draft.tokens, draft.parents, strict=True)}
    assert paths == {(8, 5), (9, 5), (1, 8), (2, 8)}
    assert len(drafter.draft(r, 3).tokens) == 3
    observe(drafter, TokenTree([[5]], [[-1]]), ((3, 4),))
    assert set(drafter.draft(r, 6).tokens) == {3, 4}


def test_block_gets_the_chain_of_likeliest_candidates():
    drafter = make_drafter(num_tokens=3, top_k=2)
    observe(drafter, TokenTree([[5, 8]], [[-1, 0]]), ((8, 9), (5, 2)))
    draft = drafter.draft(request([7, 5], rule=BLOCK), 9)
    assert (draft.tokens, draft.parents) == ((8, 5, 8), (0, 1, 2))


@pytest.mark.parametrize("name", ["top_k", "nodes"])
def test_options_below_their_minimum_are_errors(name):
    with pytest.raises(ForedraftError, match=f"{name} must be at least 1, got 0"):
        make_drafter(**{name: 0})
