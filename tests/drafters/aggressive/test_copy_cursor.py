"""Position of an output in its source: the cursor against a search of the whole source, edit by edit.

Guards against a cursor that is lost after an edit, a match that is longer but elsewhere or nearer but shorter than
another, source tokens that are copied a second time, and endless drafts inside text that is not in the source.
"""

import random

import pytest

from foredraft.drafters.aggressive.copy_cursor import FULL_MATCH, MAX_EDIT_DISTANCE, CopyCursor

SOURCE = tuple(random.Random(0).sample(range(400), 300))  # no token twice


def search_source(follower):
    """Find (position, confidence) by a search of the whole source. The longest match counts. Of equal ones, those ahead
    of the cursor count, then the nearest to the expected position, then the later of two."""
    best = None
    for place in range(1, len(follower.source)):
        for n in range(min(FULL_MATCH, len(follower.recent_tokens), place), 0, -1):
            if follower.source[place - n : place] != tuple(follower.recent_tokens[-n:]):
                continue
            far = abs(place - follower.position)
            if n > 1 or (place in nearest_of(follower, n) and far <= MAX_EDIT_DISTANCE):
                key = (n, place >= follower.confirmed_position, -far, place)
                best = key if best is None else max(best, key)
            break
    return (follower.position, 0) if best is None else (best[3], best[0])


def nearest_of(follower, n):
    """List the positions of matches of n tokens that count: those ahead of the cursor, if there are any."""
    places = [
        place
        for place in range(n, len(follower.source))
        if follower.source[place - n : place] == tuple(follower.recent_tokens[-n:])
    ]
    return [place for place in places if place >= follower.confirmed_position] or places


@pytest.mark.parametrize("seed", range(20))
def test_the_place_is_that_of_a_search_of_the_whole_source(seed):
    """Random texts over few tokens, so that everything occurs again and again."""
    chance = random.Random(seed)
    source = [chance.randrange(12) for _ in range(150)]
    output, at = [], 0
    while at < len(source):
        kind = chance.random()
        if kind < 0.06:
            output.append(chance.randrange(12))  # put in
        elif kind < 0.12:
            at += chance.randrange(1, 6)  # left out
        elif kind < 0.18:
            output.append(chance.randrange(12))
            at += 1
        elif kind < 0.2:
            at = chance.randrange(len(source))  # moved
        else:
            output.append(source[at])
            at += 1
        if len(output) > 400:
            break
    follower = CopyCursor(tuple(source))
    num_found = 0
    while follower.num_read < len(output):
        follower.read(output[follower.num_read : follower.num_read + chance.randrange(1, 4)])
        if follower.num_matched == 0:
            expected = search_source(follower)
            follower.draft(5)
            assert (follower.position, follower.num_matched) == expected
            num_found += expected[1] > 0
    assert num_found > 0


@pytest.mark.parametrize(
    ("read", "drafts"),
    [
        ([500], [SOURCE[11:13], SOURCE[12:14], SOURCE[10:12]]),  # for one token, for two, put in
        ([500, 501], [SOURCE[12:14], SOURCE[13:15], SOURCE[10:12]]),
        ([SOURCE[11]], [SOURCE[12:14]]),  # left out
        ([SOURCE[13], SOURCE[14]], [SOURCE[15:19]]),
        ([500, SOURCE[11]], [SOURCE[12:14]]),
        ([500, SOURCE[10]], [SOURCE[11:13]]),
        ([SOURCE[200]], [SOURCE[11:13], SOURCE[12:14], SOURCE[10:12]]),  # one token far away is no evidence
        ([SOURCE[200], SOURCE[201]], [SOURCE[202:206]]),
    ],
)
def test_after_an_edit_the_likeliest_ways_on_come_first(read, drafts):
    """Ten tokens follow; then others, of which 500 and 501 are new."""
    for count in (1, len(drafts)):
        follower = CopyCursor(SOURCE)
        follower.read(SOURCE[:10])
        follower.read(read)
        assert follower.draft_branches(20, count) == drafts[:count]


def test_while_it_follows_there_is_one_way_on_and_all_of_it():
    follower = CopyCursor(SOURCE)
    assert follower.draft_branches(31, 3) == [SOURCE[:31]]
    follower.read(SOURCE[:31])
    assert follower.draft_branches(31, 3) == [SOURCE[31:62]]
    follower.read(SOURCE[31:])
    assert follower.draft_branches(31, 3) == []


def test_text_of_ones_own_is_not_drafted_for():
    """A long insertion: a few draft tokens, then none until the source matches again."""
    follower = CopyCursor(SOURCE)
    follower.read(SOURCE[:50])
    drafted = []
    for token in range(5000, 5040):
        follower.read([token])
        drafted.append(len(follower.draft(20)))
    assert all(drafted[: MAX_EDIT_DISTANCE - 1])
    assert not any(drafted[MAX_EDIT_DISTANCE:])
    follower.read(SOURCE[50:52])
    assert follower.draft(4) == SOURCE[52:56]


def test_a_text_that_begins_anywhere_is_found_by_what_goes_before_it():
    follower = CopyCursor.from_unknown_position(SOURCE, [7, 7, *SOURCE[40:44]])
    assert follower.draft(9) == SOURCE[44:53]
    follower = CopyCursor.from_unknown_position(SOURCE, [5000])
    assert follower.draft_branches(9, 3) == []
    follower.read(SOURCE[80:82])
    assert follower.draft(9) == SOURCE[82:86]
    assert CopyCursor.from_unknown_position((), []).draft_branches(9, 3) == []


def test_what_is_read_at_once_is_read_token_by_token():
    chance = random.Random(3)
    source = tuple(chance.randrange(9) for _ in range(80))
    output = [token if chance.random() < 0.8 else 1 for token in source]
    one, many = CopyCursor(source), CopyCursor(source)
    for at in range(0, len(output), 5):
        many.read(output[at : at + 5])
        for token in output[at : at + 5]:
            one.read([token])
        assert many.draft_branches(10, 3) == one.draft_branches(10, 3)
