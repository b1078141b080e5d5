"""Probabilities of draft trees, and their repetition over a small vocabulary."""

import itertools

import numpy as np
import pytest
import torch

from foredraft.certify.draft_tree import DraftTree, Siblings
from foredraft.tree import SampledSiblings, TokenTree
from foredraft.verification.probs import Probs

Q = Probs(np.array([0.5, 0.3, 0.2]), 3)


def test_samples_without_replacement_have_probabilities_that_sum_to_one():
    trees = [
        DraftTree((0, a, b), (-1, 0, 0), {0: Siblings(Q, (1, 2), False)})
        for a, b in itertools.permutations(range(3), 2)
    ]
    assert sum(tree.probability for tree in trees) == pytest.approx(1)
    assert trees[0].probability == pytest.approx(0.5 * 0.3 / 0.5)


def test_samples_with_replacement_multiply():
    twice = DraftTree((0, 1), (-1, 0), {}, {0: (Siblings(Q, (1, 1), True),)})
    assert twice.probability == pytest.approx(0.09)


def test_deterministic_drafts_have_probability_one_and_a_group_of_their_own():
    trees = [DraftTree((0, token), (-1, 0), {}) for token in (1, 2)]
    assert [tree.probability for tree in trees] == [1, 1]
    assert trees[0].group_key != trees[1].group_key


def test_outcomes_of_one_experiment_share_a_group():
    trees = [DraftTree((0, token), (-1, 0), {0: Siblings(Q, (1,), False)}) for token in (1, 2)]
    assert trees[0].group_key == trees[1].group_key
    assert trees[0].key != trees[1].key


def test_a_tree_of_a_step_is_read_from_its_root_on():
    q = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    tree = TokenTree([[7, 8, 1, 2]], [[-1, 0, 1, 2]], q, ((8,),), num_sampled_children=(1, 0, 0))
    draft = DraftTree.from_tree(tree, 0)
    assert (draft.tokens, draft.parents) == ((8, 1, 2), (-1, 0, 1))
    assert draft.probability == pytest.approx(0.5)
    assert draft.collect_path(2) == (1, 2)


def test_a_token_of_probability_one_is_deterministic():
    """Fault: an ensemble whose members draft in turn, one of them without samples, in one group of outcomes."""
    sampled, certain = torch.tensor([[0.0, 0.5, 0.5, 0.0]]), torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    trees = [
        DraftTree.from_tree(TokenTree([[8, 1]], [[-1, 0]], q.repeat(2, 1), num_sampled_children=(1, 0)), 0)
        for q in (sampled, certain)
    ]
    assert [tree.probability for tree in trees] == [0.5, 1]
    assert trees[0].group_key != trees[1].group_key


def test_a_repeated_tree_has_the_small_vocabulary_and_all_samples():
    further = {(0, 0): (SampledSiblings(torch.tensor([0.0, 0.4, 0.0, 0.6]), (1, 1), True),)}
    draft = DraftTree.from_tree(TokenTree([[3, 1]], [[-1, 0]], further_samples=further), 0)
    tree = draft.repeat(2, [1, 3])
    assert tree.tokens == [[1, 0], [1, 0]]
    assert tree.further_samples is not None
    assert tree.further_samples[1, 0][0].q.tolist() == pytest.approx([0.4, 0.6])
    assert tree.further_samples[1, 0][0].children == (1, 1)
