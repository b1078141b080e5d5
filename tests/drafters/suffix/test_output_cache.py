"""The cache of past outputs: bounded in tokens and tenants, the oldest evicted first, separate for each tenant."""

import random

import pytest

from foredraft.drafters.suffix.automaton import TEXT_BREAK, ReferenceAutomaton, SuffixMatch
from foredraft.drafters.suffix.native_automaton import get_automaton_class
from foredraft.drafters.suffix.output_cache import NUM_SECTIONS, SuffixCache

CAPACITY = 800


def make_cache(capacity=CAPACITY, most_tenants=4):
    return SuffixCache(capacity, most_tenants, get_automaton_class())


def longest(store, tenant, tokens):
    """Tokens of the longest match of a text's end among a tenant's outputs."""
    places = [SuffixMatch(section.automaton) for section in store.list_sections(tenant)]
    return max((type(place.automaton).advance([place], tokens)[0].length for place in places), default=0)


def test_an_output_is_found_by_its_tenant_alone():
    store = make_cache()
    store.add(b"a", [1, 2, 3])
    assert longest(store, b"a", [1, 2, 3]) == 3
    assert longest(store, b"b", [1, 2, 3]) == 0
    assert longest(store, b"", [1, 2, 3]) == 0


def test_the_oldest_outputs_go_first_and_the_newest_stay():
    store = make_cache()
    for i in range(100):
        store.add(b"a", [1000 * i + j for j in range(50)])
        assert store.num_tokens <= CAPACITY
    found = [sum(longest(store, b"a", [1000 * i + j]) for j in range(50)) for i in range(100)]
    assert found == sorted(found), "what goes is older than what stays"
    assert found[-1] == 50
    assert sum(found) >= CAPACITY * (NUM_SECTIONS - 1) // NUM_SECTIONS - 2 * 16, "no more than a part is lost at once"


@pytest.mark.parametrize("most", [1, 3, 4, 10])
def test_the_number_of_outputs_is_bounded_too(most):
    store = SuffixCache(CAPACITY, 4, get_automaton_class(), max_outputs=most)
    for i in range(30):
        store.add(b"a", [10 * i + 1, 10 * i + 2])
        assert 1 <= store.num_outputs <= most
    found = [longest(store, b"a", [10 * i + 1, 10 * i + 2]) for i in range(30)]
    assert found == sorted(found), "the oldest go first"
    assert found[-1] == 2
    assert sum(found) == 2 * store.num_outputs > 2 * most * (NUM_SECTIONS - 1) // NUM_SECTIONS - 2


def test_an_output_longer_than_the_store_leaves_its_end():
    store = make_cache()
    text = list(range(5000))
    store.add(b"a", text)
    assert store.num_tokens <= CAPACITY
    assert longest(store, b"a", text[-50:]) > 0
    assert longest(store, b"a", text[:50]) == 0


def test_tenants_are_bounded_and_who_wrote_longest_ago_goes():
    store = make_cache(most_tenants=3)
    for name in (b"a", b"b", b"c"):
        store.add(name, [1, 2, 3])
    store.add(b"a", [4])
    store.add(b"d", [1, 2, 3])
    assert store.num_tenants == 3
    assert [longest(store, name, [1, 2, 3]) for name in (b"a", b"b", b"c", b"d")] == [3, 0, 3, 3]


def test_an_endless_row_of_tenants_holds_no_more_than_the_bounds():
    """Each caller has another salt."""
    store = make_cache(capacity=10_000, most_tenants=8)
    for i in range(500):
        store.add(str(i).encode(), list(range(30)))
    assert store.num_tenants == 8
    assert store.num_tokens <= 8 * 31


@pytest.mark.parametrize("seed", range(5))
def test_bounds_hold_and_nothing_is_lost_track_of(seed):
    draw = random.Random(seed)
    store = SuffixCache(draw.choice([16, 300, 800]), draw.choice([1, 3, 50]), ReferenceAutomaton)
    for _ in range(200):
        store.add(bytes([draw.randrange(6)]), [draw.randrange(9) for _ in range(draw.randrange(120))])
        sections = [section for tenant in range(6) for section in store.list_sections(bytes([tenant]))]
        assert store.num_tokens == sum(len(section.automaton) for section in sections) <= store.capacity
        assert store.num_tenants <= store.max_tenants


def test_two_outputs_are_two_texts():
    store = SuffixCache(CAPACITY, 4, ReferenceAutomaton)
    store.add(b"a", [1, 2])
    store.add(b"a", [3, 4])
    (section,) = store.list_sections(b"a")
    assert longest(store, b"a", [1, 2]) == 2
    assert TEXT_BREAK in section.automaton.states[0].targets
    assert not any(3 in state.targets for state in section.automaton.states if 2 in state.targets and state.length)


def test_a_section_says_that_it_has_grown():
    store = make_cache()
    store.add(b"a", [1, 2])
    (section,) = store.list_sections(b"a")
    before = section.version
    store.add(b"b", [1, 2])
    assert section.version == before
    store.add(b"a", [1, 2])
    assert section.version > before
    store.add(b"a", [])
    assert store.num_tokens == 9
