"""The suffix automaton: matches and counts by searching the whole text, the native one by its reference, and its cost.

Guards against a match that is not the longest, counts that a split loses or doubles, a distribution that differs
between the native code and its replacement, and a cost that grows with the text or the match.
"""

import random
from collections import defaultdict

import pytest

from foredraft.drafters.suffix.automaton import (
    MAX_CONTEXT_LENGTH,
    MAX_CONTINUATIONS,
    RankedDraftSpec,
    ReferenceAutomaton,
    SuffixAutomaton,
    SuffixMatch,
    build_discount_table,
)
from foredraft.drafters.suffix.native_automaton import NativeAutomaton, get_automaton_class
from foredraft.kernels.cpu.library import load_library

native = pytest.mark.skipif(load_library() is None, reason="no native kernels")
KINDS = [ReferenceAutomaton, pytest.param(NativeAutomaton, marks=native)]
TRUST = build_discount_table((0.75, 0.7, 0.75, 0.8, 0.95))
SEEDS = range(12)


def text(seed: int, size: int = 40) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2 + seed % 3) for _ in range(size)]


def build(kind: type[SuffixAutomaton], tokens: list[int]) -> SuffixAutomaton:
    one = kind()
    one.extend(tokens)
    return one


def occurs(part: list[int], tokens: list[int], stop: int | None = None) -> bool:
    stop = len(tokens) if stop is None else stop
    return any(tokens[i : i + len(part)] == part for i in range(stop - len(part) + 1))


def ends(part: list[int], tokens: list[int]) -> list[int]:
    return [i for i in range(len(part), len(tokens) + 1) if tokens[i - len(part) : i] == part]


def count_continuations(tokens: list[int]) -> dict[tuple[int, ...], dict[int, int]]:
    """Count the tokens after the deepest context that has seen them, by definition: one by one, over every suffix."""
    counts: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for at, token in enumerate(tokens):
        past = tokens[:at]
        suffixes = [past[i:] for i in range(at + 1)]  # the longest first
        for place, suffix in enumerate(suffixes):
            if occurs([*suffix, token], past):
                same = ends(suffix, past)
                for alike in suffixes[place:]:
                    if ends(alike, past) == same:
                        counts[tuple(alike)][token] += 1
                break
            counts[tuple(suffix)][token] = 1
    return counts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_longest_suffix_that_occurred_before_is_known_after_every_token(kind, seed):
    tokens, one = text(seed), kind()
    for size in range(1, len(tokens) + 1):
        one.extend(tokens[size - 1 : size])
        so_far = tokens[:size]
        longest = next(n for n in range(size - 1, -1, -1) if occurs(so_far[size - n :], so_far, size - 1))
        assert one.match_end().length == longest
        assert len(one) == size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_another_text_is_followed_at_its_longest_match(kind, seed):
    one, other = build(kind, text(seed)), text(seed + 100, 60)
    place = SuffixMatch(one)
    for size in range(1, len(other) + 1):
        (place,) = kind.advance([place], other[size - 1 : size])
        longest = next(n for n in range(size, -1, -1) if occurs(other[size - n : size], text(seed)))
        assert place.length == longest
    assert kind.advance([SuffixMatch(one)], other) == [place]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_context_counts_what_it_was_the_deepest_to_know(seed):
    tokens = text(seed)
    one, wanted = build(ReferenceAutomaton, tokens), count_continuations(tokens)
    for start in range(len(tokens)):
        for stop in range(start, len(tokens)):
            part = tokens[start:stop]
            (place,) = ReferenceAutomaton.advance([SuffixMatch(one)], part)
            assert place.length == len(part)
            assert one.states[place.state].counts == wanted[tuple(part)]
            assert one.states[place.state].total == sum(wanted[tuple(part)].values())


@native
@pytest.mark.parametrize("seed", range(60))
def test_the_native_one_gives_the_very_bits_of_its_reference(seed):
    draw = random.Random(seed)
    size = draw.choice([2, 3, 5, 40, 300])
    texts = [[draw.randrange(size) for _ in range(draw.randrange(1, 400))] for _ in range(3)]
    recent = [draw.randrange(size) for _ in range(10)]
    shape = RankedDraftSpec(
        draw.randrange(1, 20), draw.randrange(1, 9), draw.randrange(1, 5), draw.choice([0, 0.05]), frozenset([0])
    )
    seen = []
    for kind in (ReferenceAutomaton, NativeAutomaton):
        ones = [build(kind, tokens) for tokens in texts]
        places = [ones[0].match_end(), *kind.advance([SuffixMatch(one) for one in ones[1:]], recent)]
        seen.append(
            (
                [place.length for place in places],
                kind.predict(places, TRUST),
                kind.draft(places, TRUST, shape),
                [one.num_operations for one in ones],
            )
        )
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_distribution_is_one_falling_and_of_known_tokens(kind, seed):
    one = build(kind, [7, *text(seed), -1, 7])
    prediction = kind.predict([one.match_end()], TRUST)
    assert 0 < len(prediction.tokens) <= MAX_CONTINUATIONS
    assert min(prediction.tokens) >= 0
    assert len(set(prediction.tokens)) == len(prediction.tokens)
    assert prediction.probs == sorted(prediction.probs, reverse=True)
    assert prediction.probs[-1] > 0
    assert sum(prediction.probs) < 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_distribution_by_hand(kind):
    one = build(kind, [1, 2, 3, 9, 2, 4, 8, 1, 2])
    place = one.match_end()
    assert place.length == 2
    # "1 2" was followed by 3 once; what it is not sure of goes to "2", which was by 3 and by 4
    of_two, of_one = 0.75 * 0.7 / 0.75, 0.75
    rest = of_two * (2 * of_one) / 2
    prediction = kind.predict([place], TRUST)
    assert prediction.tokens == [3, 4]
    assert prediction.probs == pytest.approx([1 - of_two + of_two * (1 - of_one) / 2, of_two * (1 - of_one) / 2])
    assert rest > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_context_comes_first_whosever_it_is(kind):
    own, other = build(kind, [5, 1, 6, 1]), build(kind, [3, 5, 6, 1, 2])
    (place,) = kind.advance([SuffixMatch(other)], [5, 1, 6, 1])
    assert (own.match_end().length, place.length) == (1, 2)
    assert kind.predict([own.match_end(), place], TRUST).tokens[0] == 2
    alike = build(kind, [1, 9])
    (place,) = kind.advance([SuffixMatch(alike)], [1])
    assert kind.predict([own.match_end(), place], TRUST).tokens[0] == 6, "of equal ones the first"


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_is_drafted_past_the_end_of_the_text(kind):
    one = build(kind, [9, 5, 6, 7, 5, 6, 7, 5, 6, 7])
    grown = kind.draft([one.match_end()], TRUST, RankedDraftSpec(8, 8))
    assert grown.tokens == [5, 6, 7, 5, 6, 7, 5, 6]
    assert grown.parents == list(range(8))
    assert grown.path_probs == sorted(grown.path_probs, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_is_the_likeliest_nodes_within_its_shape(kind):
    one = build(kind, [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 5, 1, 2])
    wide = kind.draft([one.match_end()], TRUST, RankedDraftSpec(6, 3, width=2))
    assert [token for token, parent in zip(wide.tokens, wide.parents, strict=True) if parent == 0] == [3, 4]
    assert len(wide.tokens) == 6
    assert kind.draft([one.match_end()], TRUST, RankedDraftSpec(6, 1, width=2)).parents == [0, 0]
    assert kind.draft([one.match_end()], TRUST, RankedDraftSpec(6, 6, end_ids=frozenset([3]))).tokens == [3]
    chance = wide.path_probs[0]
    assert kind.draft([one.match_end()], TRUST, RankedDraftSpec(6, 6, min_probability=chance)).tokens == [3]
    assert kind.draft([one.match_end()], TRUST, RankedDraftSpec(6, 6, min_probability=chance + 1e-9)).tokens == []
    assert kind.draft([], TRUST, RankedDraftSpec(6, 6)).tokens == []


def hostile(name: str, size: int) -> list[int]:
    draw = random.Random(1)
    if name == "fibonacci":
        a, b = [1], [0]
        while len(b) < size:
            a, b = b, b + a
        return b[:size]
    return {
        "random": [draw.randrange(4000) for _ in range(size)],
        "binary": [draw.randrange(2) for _ in range(size)],
        "one token": [1] * size,
        "a half each": [1] * (size // 2) + [2] * (size - size // 2),
        "abbb...c": [0] + [1] * (size // 2) + [2] * (size - size // 2 - 1),
        "all different": list(range(size)),
        "one context": [token for i in range(size // 2) for token in (0, i + 1)],
    }[name]


@native
@pytest.mark.parametrize(
    "name", ["random", "binary", "one token", "a half each", "abbb...c", "all different", "one context", "fibonacci"]
)
def test_a_token_costs_the_same_however_long_the_text(name):
    """The bound counts visited states and copied continuations instead of time: at most five for each token."""
    for size in (1000, 8000, 64000):
        one = build(NativeAutomaton, hostile(name, size))
        assert len(one) == size
        assert one.num_operations <= 5 * size
    assert one.num_bytes <= 200 * size


def test_trust_falls_and_its_quotients_are_discounts():
    assert len(TRUST) == MAX_CONTEXT_LENGTH + 1
    assert TRUST[3] / TRUST[1] == pytest.approx(0.7 * 0.75)
    assert TRUST[MAX_CONTEXT_LENGTH] / TRUST[MAX_CONTEXT_LENGTH - 1] == pytest.approx(0.95)


@native
def test_the_native_one_is_used_where_there_is_one():
    assert get_automaton_class() is NativeAutomaton


def test_without_native_kernels_the_reference_serves(monkeypatch):
    monkeypatch.setattr("foredraft.drafters.suffix.native_automaton.load_library", lambda: None)
    assert get_automaton_class() is ReferenceAutomaton
