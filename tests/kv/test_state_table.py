"""Ids of recurrent states: none is lost, shared by two positions, or missing where a request continues."""

import random

import pytest

from foredraft.kv.allocator import PageAllocator
from foredraft.kv.state_table import NULL_STATE, StateTable

SIZE = 4


def make_table(length: int = 0, num_pages: int = 8) -> tuple[StateTable, list[int]]:
    table, pages = StateTable(SIZE), list(range(11, 11 + num_pages))
    for position in range(length):
        table.add(pages, position)
    return table, pages


def list_lengths(table: StateTable, pages: list[int]) -> list[int]:
    return [length for length in range(1, SIZE * len(pages) + 1) if table.find(pages, length) is not None]


def test_the_state_before_the_first_token_is_the_null_state() -> None:
    table, pages = make_table()
    assert table.find(pages, 0) == NULL_STATE
    assert table.add(pages, 0) != NULL_STATE


def test_rewinding_keeps_the_last_state_and_those_of_page_ends() -> None:
    table, pages = make_table(15)
    table.rewind(pages, 10)
    assert list_lengths(table, pages) == [4, 8, 10]
    assert table.num_used == 3
    table.rewind(pages, 0)
    assert table.num_used == 0


def test_a_tree_path_moves_its_last_state_to_the_front() -> None:
    table, pages = make_table(6)
    table.rewind(pages, 6)
    states = [table.add(pages, 6 + node) for node in range(5)]
    table.commit(pages, 6, [0, 3, 4])  # tokens 6, 7 and 8; token 7 ends a page
    assert list_lengths(table, pages) == [4, 8, 9]
    assert table.find(pages, 8) == states[3]
    assert table.find(pages, 9) == states[4]
    table.check_ids()
    table.check_integrity([(pages, 9)])


def test_a_rejected_step_leaves_the_state_before_it() -> None:
    table, pages = make_table(6)
    before = table.find(pages, 6)
    table.rewind(pages, 6)
    table.add(pages, 6)
    table.commit(pages, 6, [])
    assert table.find(pages, 6) == before
    assert table.num_used == 2  # that, and the page end


def test_chunks_without_a_commit_between_them_leave_no_state_behind() -> None:
    table, pages = make_table()
    for start, stop in ((0, 3), (3, 21), (21, 30)):
        table.rewind(pages, start)
        table.add(pages, stop - 1)
    table.rewind(pages, 30)
    assert list_lengths(table, pages) == [30]


def test_a_request_continues_after_the_last_state_before_a_missing_one() -> None:
    table, pages = make_table(10)
    table.rewind(pages, 10)
    assert [table.find_last_valid(pages, length) for length in (10, 9, 8, 7, 3, 0)] == [10, 8, 8, 4, 0, 0]


def test_trimming_frees_the_least_recently_used_page_ends_that_may_go() -> None:
    table, pages = make_table(24)
    table.rewind(pages, 24)
    assert table.num_page_ends == 6
    table.find(pages, 4)  # used again
    table.trim(3, [pages[1]])
    assert list_lengths(table, pages) == [4, 8, 24]
    table.trim(0, pages)
    assert table.num_page_ends == 3


def test_a_freed_page_frees_its_states() -> None:
    allocator, table = PageAllocator(6, SIZE), StateTable(SIZE)
    allocator.on_free = table.drop_page
    pages: list[int] = []
    allocator.grow(pages, 10)
    for position in range(10):
        table.add(pages, position)
    allocator.mark_cacheable(pages[0])
    first = pages[0]
    allocator.free(pages)
    assert table.list_pages() == [first]  # cached, so its states stay
    allocator.discard(first)
    assert table.num_used == 0
    table.check_ids()


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_of_requests_with_shared_pages(seed: int) -> None:
    rng, table, next_page = random.Random(seed), StateTable(SIZE), 100
    shared = [1, 2]
    for position in range(2 * SIZE):
        table.add(shared, position)
    table.rewind(shared, 2 * SIZE)
    requests: dict[int, tuple[list[int], int]] = {}
    for step in range(300):
        b = rng.randrange(4)
        if b not in requests or rng.random() < 0.05:  # ended or preempted, then admitted with a hit
            for page in requests.pop(b, ([], 0))[0][2:]:
                table.drop_page(page)
            pages = [*shared, *range(next_page, next_page + 12)]
            next_page += 12
            requests[b] = pages, 2 * SIZE
        pages, length = requests[b]
        size = rng.randint(1, 6)
        if length + size > SIZE * len(pages):
            continue
        table.rewind(pages, length)
        before = table.find(pages, length)
        states = [table.add(pages, length + node) for node in range(size)]
        path = sorted(rng.sample(range(size), rng.randint(0, size)))
        table.commit(pages, length, path)
        requests[b] = pages, length + len(path)
        assert table.find(pages, length + len(path)) == (states[path[-1]] if path else before), step
        table.check_ids()
        table.check_integrity(list(requests.values()))


def test_integrity_names_a_lost_and_a_needless_state() -> None:
    table, pages = make_table(7)
    with pytest.raises(AssertionError, match="no request and no page end needs"):
        table.check_integrity([(pages, 7)])
    table.rewind(pages, 7)
    table.check_integrity([(pages, 7)])
    with pytest.raises(AssertionError, match="no state after its computed tokens"):
        table.check_integrity([(pages, 6)])
