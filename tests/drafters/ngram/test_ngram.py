"""Prompt lookup: matches, drafts, and no state that carries over from one request to the next."""

import random

import pytest

from foredraft.drafters.method import DrafterContext
from foredraft.drafters.ngram import drafter as ngram
from foredraft.drafters.ngram.method import create
from foredraft.errors import ForedraftError
from foredraft.request import Batch
from foredraft.sampling.params import Sampling
from tests.support.requests import make_request


def make_drafter(num_tokens=5, **options):
    return create(ngram.Config(**options), DrafterContext(vocab_size=50, num_speculative_tokens=num_tokens))


def request(tokens, slot=0, **more):
    """Make a request that samples the token after `tokens` next; the last three tokens are output."""
    made = make_request(slot, tokens[:-3], Sampling(max_tokens=more.pop("max_tokens", 100)), seed=1, **more)
    made.output = list(tokens[-3:])
    made.num_computed = made.num_tokens - 1
    return made


def propose_rows(drafter, *requests, budget=None):
    """Propose for every request: [b] -> (tokens, parents) below the root."""
    budget = drafter.spec.max_nodes if budget is None else budget
    tree = drafter.propose(Batch(requests, (1,) * len(requests), (budget,) * len(requests)))
    assert [row[0] for row in tree.tokens] == [r.tokens[-1] for r in requests]
    assert tree.q is None
    return [(row[1:], links[1:]) for row, links in zip(tree.tokens, tree.parents, strict=True)]


def draft_tokens(drafter, *requests, **more):
    return [tokens for tokens, _ in propose_rows(drafter, *requests, **more)]


def occurrences(tokens, end, config):
    """Find (length of the longest match of the tokens before `end`, the positions after it in rising order)."""
    for n in range(min(config.prompt_lookup_max, end), config.prompt_lookup_min - 1, -1):
        places = [place for place in range(n, end) if tokens[place - n : place] == tokens[end - n : end]]
        if places:
            return n, places
    return 0, []


def learn_by_definition(tokens, config):
    """Compute (is the first occurrence better than the latest, accuracy by match length), by definition."""
    lead, right = 0.0, {}
    for end, token in enumerate(tokens):
        n, places = occurrences(tokens, end, config)
        if places:
            first, latest = tokens[places[0]] == token, tokens[places[-1]] == token
            share = right.get(n, 0.5)
            right[n] = share + ngram.ACCURACY_UPDATE_RATE * ((first if lead > ngram.MIN_LEAD else latest) - share)
            lead = lead if first == latest else ngram.LEAD_DECAY * lead + first - latest
    return lead > ngram.MIN_LEAD, right


def brute_force(tokens, config, length):
    """Draft by a search of the whole sequence."""
    takes_first, right = learn_by_definition(tokens, config)
    for n in range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1):
        order = range(n, len(tokens)) if takes_first else range(len(tokens) - 1, n - 1, -1)
        for place in order:
            if n <= len(tokens) and tokens[place - n : place] == tokens[-n:]:
                is_trusted = n == config.prompt_lookup_max or right.get(n, 0.5) > ngram.MIN_ACCURACY
                bound = length if is_trusted else min(length, n * config.tokens_per_match)
                grown = list(tokens)
                for i in range(bound):
                    grown.append(grown[place + i])
                return grown[len(tokens) :]
    return []


def test_the_longest_match_wins_over_a_later_shorter_one():
    text = [1, 2, 3, 4, 10, 11, 12, 13, 14, 9, 3, 4, 20, 21, 22, 9, 1, 2, 3, 4]
    assert draft_tokens(make_drafter(), request(text)) == [[10, 11, 12, 13, 14]]


def test_the_first_of_equal_matches_wins_where_it_foretold_the_text_better():
    """Guards texts that go back to their beginning again and again, and change a little in between."""
    text = [1, 2, 3, 4, 10, 11, 12, 9]
    for other in range(20, 34):
        text += [1, 2, 3, 4, other, other + 15, 9, 1, 2, 3, 4, 10, 11, 12, 9]
    text += [1, 2, 3, 4, 30, 40, 9, 1, 2, 3, 4]
    assert learn_by_definition(text, ngram.Config())[0]
    assert draft_tokens(make_drafter(3), request(text)) == [[10, 11, 12]]
    branches = propose_rows(make_drafter(3, branches=2), request(text))[0][0]
    assert sorted(branches) == [9, 10, 11, 12, 30, 40]


def test_short_matches_draft_as_far_as_long_ones_once_they_foretell_a_text():
    """Guards repetitive texts, for which a bound by the match length halves every draft after a new token."""
    line = [5, 6, 7, 8, 9, 10, 11]
    text = [token for number in range(12) for token in (*line, 20 + number)] + [5, 6]
    assert draft_tokens(make_drafter(6), request([*line, 20, 5, 6])) == [[7, 8, 9, 10]]
    assert draft_tokens(make_drafter(6), request(text)) == [[7, 8, 9, 10, 11, 31]]


def test_the_latest_of_equal_matches_wins():
    text = [1, 2, 3, 4, 10, 8, 1, 2, 3, 4, 20, 21, 22, 23, 24, 9, 1, 2, 3, 4]
    assert draft_tokens(make_drafter(), request(text)) == [[20, 21, 22, 23, 24]]


def test_no_match_is_no_draft():
    assert draft_tokens(make_drafter(), request([1, 2, 3, 4, 5, 6])) == [[]]
    assert draft_tokens(make_drafter(prompt_lookup_min=3), request([1, 2, 9, 8, 7, 1, 2])) == [[]]


def test_a_loop_is_drafted_past_the_end_of_the_text():
    assert draft_tokens(make_drafter(8), request([9, 5, 6, 7, 5, 6, 7, 5, 6, 7])) == [[5, 6, 7, 5, 6, 7, 5, 6]]
    assert draft_tokens(make_drafter(8), request([5] * 9)) == [[5] * 8]


def test_a_weak_match_drafts_less():
    text = [1, 10, 11, 12, 13, 14, 15, 9, 1]
    assert draft_tokens(make_drafter(), request(text)) == [[10, 11]]
    assert draft_tokens(make_drafter(tokens_per_match=4), request(text)) == [[10, 11, 12, 13]]
    assert draft_tokens(make_drafter(prompt_lookup_max=1), request(text)) == [[10, 11, 12, 13, 14]]


def test_branches_share_their_beginning():
    text = [1, 2, 10, 11, 12, 9, 1, 2, 10, 20, 21, 9, 1, 2]
    tree = propose_rows(make_drafter(3, branches=2, prompt_lookup_max=2), request(text))
    assert tree == [([10, 20, 21, 11, 12], [0, 1, 2, 1, 4])]


def test_equal_continuations_count_as_one_branch():
    text = [1, 2, 10, 11, 12, 9, 1, 2, 30, 31, 32, 9, 1, 2, 30, 31, 32, 9, 1, 2]
    tree = propose_rows(make_drafter(3, branches=2, prompt_lookup_max=2), request(text))
    assert tree == [([30, 31, 32, 10, 11, 12], [0, 1, 2, 0, 4, 5])]


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("budget", [0, 1, 2, 4, 15])
def test_budget_and_room_are_kept(branches, budget):
    drafter = make_drafter(5, branches=branches)
    assert drafter.spec.max_nodes == 5 * branches
    rng = random.Random(0)
    for slot in range(30):
        one = request([rng.randrange(4) for _ in range(40)], slot, max_tokens=5 + slot % 6)
        ((tokens, parents),) = propose_rows(drafter, one, budget=budget)
        assert len(tokens) <= min(budget, drafter.spec.max_nodes)
        assert all(0 <= parent <= node for node, parent in enumerate(parents))
        assert len(set(zip(parents, tokens, strict=True))) == len(tokens)  # no sibling twice
        depths = [0]
        for parent in parents:
            depths.append(depths[parent] + 1)
        assert max(depths) <= one.max_draft_depth


@pytest.mark.parametrize("vocab_size", [2, 6])
def test_an_index_grown_step_by_step_finds_what_a_search_of_the_whole_text_finds(vocab_size):
    rng = random.Random(vocab_size)
    config = ngram.Config()
    drafter = make_drafter(6)
    one = request([rng.randrange(vocab_size) for _ in range(12)], max_tokens=1000)
    for step in range(120):
        if step % 5 != 3:  # it may be left out of a step
            assert draft_tokens(drafter, one) == [brute_force(one.tokens, config, 6)]
        one.output += [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 5))]
        one.num_computed = one.num_tokens - 1


def test_a_reused_slot_knows_nothing_of_the_former_request():
    drafter = make_drafter()
    draft_tokens(drafter, request([1, 2, 3, 4, 40, 41, 42, 43, 44, 45]))
    drafter.forget([0, 7])
    assert draft_tokens(drafter, request([7, 8, 9, 1, 2, 3, 4])) == [[]]


def test_requests_of_a_batch_do_not_see_each_other():
    a, b = request([1, 2, 3, 4, 40, 41, 42, 9, 9]), request([7, 8, 6, 1, 2, 3, 4], slot=1)
    assert draft_tokens(make_drafter(), b, a, budget=3)[0] == []


@pytest.mark.parametrize(
    "options",
    [{"prompt_lookup_min": 0}, {"prompt_lookup_min": 5}, {"branches": 0}, {"tokens_per_match": 0}],
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ForedraftError, match=r"must"):
        make_drafter(**options)
