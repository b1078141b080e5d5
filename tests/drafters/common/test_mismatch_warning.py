"""A drafter that was trained for another target is noticed while it drafts, and one that was not is left alone."""

import logging
import random

import pytest

from foredraft import Sampling
from foredraft.drafters.common.mismatch_warning import MAX_COUNTED_DRAFTS, MismatchDetector, is_near_chance
from foredraft.drafters.method import DrafterContext
from foredraft.request import Batch
from foredraft.tree import Commit, TokenTree
from tests.drafters.mlp_speculator.test_mlp_speculator import drafting, seer
from tests.support.requests import make_request

GREEDY = Sampling(max_tokens=100, temperature=0)


def make_detector(kept: int, drafts: int) -> MismatchDetector:
    """Make a detector that has seen `drafts` drafts of one token, of which the first `kept` were accepted."""
    fit = MismatchDetector(DrafterContext(vocab_size=10, model="org/head", target_name="org/model"))
    one = make_request(0, [1, 2], GREEDY, seed=1)
    batch = Batch((one,), (1,), (1,))
    for i in range(drafts):
        fit.record_proposal(batch, TokenTree.from_lists([[2, 3]], [[-1, 0]]))
        fit.record_commit(batch, Commit.from_lists([[0, 1] if i < kept else [0]], [[3, 4] if i < kept else [5]]))
    return fit


@pytest.mark.parametrize(
    ("kept", "drafts", "is_misfit"),
    [
        (0, 43, False),
        (0, 44, True),
        (1, 63, False),
        (1, 64, True),
        (2, 100, False),
        (2, 101, True),
        (9, 450, False),
        (9, 451, True),
        (10, 4 * MAX_COUNTED_DRAFTS, False),
        (50, 4 * MAX_COUNTED_DRAFTS, False),
    ],
)
def test_a_drafter_is_a_misfit_once_enough_first_tokens_were_refused(kept, drafts, is_misfit, caplog):
    assert make_detector(kept, drafts).is_mismatched == is_misfit
    counts = f"the first token of {kept} in {drafts}"
    said = f"drafts of org/head are almost never accepted ({counts}); was it trained for org/model?"
    assert [message.partition(" Speculation")[0] for message in caplog.messages] == ([said] if is_misfit else [])


def test_a_weak_drafter_is_rarely_taken_for_a_misfit():
    """A drafter whose first token is accepted in one draft of ten has an alarm in less than 2 of 100 runs."""
    rng = random.Random(0)
    alarms = 0
    for _ in range(1000):
        kept = 0
        for drafts in range(1, MAX_COUNTED_DRAFTS + 1):
            kept += rng.random() < 0.1
            if is_near_chance(drafts, kept):
                alarms += 1
                break
    assert alarms < 20


def test_a_token_of_another_member_in_a_merged_tree_is_not_the_drafters_own(caplog):
    """Fault: a head of another target passed for accepted whenever the ensemble's other member was right."""
    fit = MismatchDetector(DrafterContext(vocab_size=10, model="org/head"))
    batch = Batch((make_request(0, [1, 2], GREEDY, seed=1),), (1,), (1,))
    for _ in range(50):
        fit.record_proposal(batch, TokenTree.from_lists([[2, 3]], [[-1, 0]]))
        fit.record_commit(batch, Commit.from_lists([[0, 2]], [[3, 4]]))
    assert len(caplog.messages) == 1


def test_it_is_said_once(caplog):
    make_detector(0, 4 * MAX_COUNTED_DRAFTS)
    assert len(caplog.messages) == 1


def test_steps_without_a_draft_and_requests_that_failed_do_not_count():
    fit = MismatchDetector(DrafterContext(vocab_size=10))
    one = make_request(0, [1, 2], GREEDY, seed=1)
    batch = Batch((one,), (1,), (1,))
    for _ in range(50):
        fit.record_proposal(batch, TokenTree.from_lists([[2]], [[-1]]))
        fit.record_commit(batch, Commit.from_lists([[0]], [[5]]))
        fit.record_proposal(batch, TokenTree.from_lists([[2, 3]], [[-1, 0]]))
        fit.record_commit(batch, Commit.from_lists([[]], [[]], failed=frozenset({0})))
    assert fit.num_drafts == 0


def test_a_head_that_is_never_right_is_named_and_a_good_one_is_not(caplog):
    """Guards the silent failure: an acceptance length of 1.00, and not a word."""
    prompts = [[3], [5, 12], [9] * 20]
    with caplog.at_level(logging.WARNING):
        drafting(seer("state")).generate(prompts * 4, GREEDY)
        assert not caplog.messages
        drafting(seer("state", shift=1)).generate(prompts, GREEDY)
    assert ["almost never accepted" in message for message in caplog.messages] == [True]
