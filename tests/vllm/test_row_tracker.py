"""Recognition of requests by the tokens of their rows."""

import numpy as np

from foredraft.request import RequestStatus
from foredraft.vllm.row_tracker import ABSENT_CALLS, Row, RowTracker


def make_row(tokens, num_new=1, index=0):
    return Row(index, np.array(tokens, dtype=np.int32), num_new)


def see(tracker, *rows):
    """Run one call as the proposer does. Returns the request of each row."""
    matches = tracker.match(rows)
    found = [tracker.add(row) if match is None else match for row, match in zip(rows, matches, strict=True)]
    tracker.drop_absent()
    for tracked, row in zip(found, rows, strict=True):
        tracker.extend(tracked, row)
    return found


def test_a_new_row_is_prompt_and_first_token():
    [tracked] = see(RowTracker(100), make_row([5, 6, 7]))
    assert (tracked.request.spec.prompt, tracked.request.output) == ((5, 6), [7])
    assert tracked.request.num_computed == 2


def test_drafts_are_the_likeliest_ones_in_a_chain():
    """Seeded fault: the requests had temperature 1, so drafters sampled, and a one-hot q accepts fewer samples."""
    [tracked] = see(RowTracker(100), make_row([5, 6, 7]))
    assert tracked.request.spec.sampling.is_greedy
    assert not tracked.request.spec.rule.takes_trees


def test_rows_that_change_places_keep_their_requests():
    tracker = RowTracker(100)
    one, two = see(tracker, make_row([5, 6, 7]), make_row([8, 9, 7]))
    again = see(tracker, make_row([8, 9, 7, 3]), make_row([5, 6, 7, 4]))
    assert again == [two, one]
    assert (one.request.output, two.request.output) == ([7, 4], [7, 3])
    assert one.request.slot != two.request.slot


def test_accepted_tokens_must_be_those_of_the_draft():
    tracker = RowTracker(100)
    [one] = see(tracker, make_row([5, 6, 7]))
    one.draft = (1, 2)
    [other] = see(tracker, make_row([5, 6, 7, 1, 9, 4], num_new=3))  # it accepted 1 9, which was not drafted
    assert other is not one
    one.draft = (1, 2)
    assert see(tracker, make_row([5, 6, 7, 1, 2, 4], num_new=3)) == [one]


def test_equal_rows_have_a_request_each():
    tracker = RowTracker(100)
    one, two = see(tracker, make_row([5, 6, 7]), make_row([5, 6, 7]))
    assert one is not two
    assert set(see(tracker, make_row([5, 6, 7, 1]), make_row([5, 6, 7, 2]))) == {one, two}


def test_a_request_that_sits_out_returns_to_its_state_and_one_that_is_gone_ends():
    tracker = RowTracker(100)
    [one] = see(tracker, make_row([5, 6, 7]))
    for step in range(ABSENT_CALLS - 1):
        see(tracker, make_row([9, 8, *range(step + 1)]))
    assert see(tracker, make_row([5, 6, 7, 1])) == [one]
    for step in range(ABSENT_CALLS):
        see(tracker, make_row([4, 8, *range(step + 1)]))
    assert one.request.status is RequestStatus.FINISHED
    [other] = see(tracker, make_row([5, 6, 7, 1, 2]))
    assert other is not one


def test_a_request_whose_last_token_ends_it_ends_at_once():
    tracker = RowTracker(100, frozenset({0}))
    [one] = see(tracker, make_row([5, 6, 0]))
    see(tracker, make_row([4, 8, 1]))
    assert one.request.status is RequestStatus.FINISHED


def test_slots_are_used_again():
    tracker = RowTracker(100, frozenset({0}))
    slots = {see(tracker, make_row([step, 6, 0]))[0].request.slot for step in range(2, 40)}
    assert len(slots) <= 2
    assert len(tracker) == 1
