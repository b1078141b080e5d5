"""Page ids: under any sequence of calls, no page is lost, shared or handed out twice."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foredraft.kv.allocator import NULL_PAGE, OutOfPagesError, PageAllocator

PAGE_SIZE = 4


class Allocations(RuleBasedStateMachine):
    """Requests that grow, shrink and end, against a table of lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(12, PAGE_SIZE)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    @rule(request=st.integers(0, 4), length=st.integers(0, 60))
    def grow(self, request: int, length: int) -> None:
        table = self.tables.setdefault(request, [])
        before, free = list(table), self.allocator.num_free
        missing = self.allocator.count_pages(length) - len(table)
        if missing > free:
            with pytest.raises(OutOfPagesError, match=f"{missing} pages wanted, {free} free"):
                self.allocator.grow(table, length)
            assert table == before
            assert self.allocator.num_free == free
            return
        self.allocator.grow(table, length)
        assert table[: len(before)] == before
        self.lengths[request] = max(self.lengths.get(request, 0), length)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.tables)))
        table = self.tables[request]
        length = data.draw(st.integers(0, PAGE_SIZE * len(table)))
        kept = table[: self.allocator.count_pages(length)]
        self.allocator.shrink(table, length)
        assert table == kept
        self.lengths[request] = min(self.lengths.get(request, 0), length)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.tables)))
        self.allocator.free(self.tables.pop(request))
        self.lengths.pop(request, None)

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        self.allocator.check_integrity(list(self.tables.values()))
        held = [page for table in self.tables.values() for page in table]
        assert NULL_PAGE not in held
        assert len(held) == self.allocator.num_used == 11 - self.allocator.num_free

    @invariant()
    def every_length_has_room(self) -> None:
        assert all(PAGE_SIZE * len(self.tables[r]) >= length for r, length in self.lengths.items())


TestAllocations = Allocations.TestCase


def test_a_lone_request_has_contiguous_pages_again_after_others_ended() -> None:
    allocator = PageAllocator(20, PAGE_SIZE)
    first: list[int] = []
    second: list[int] = []
    for length in range(1, 30, 3):
        allocator.grow(first, length)
        allocator.grow(second, length)
    allocator.free(second)
    allocator.free(first)
    alone: list[int] = []
    for length in range(1, 70):
        allocator.grow(alone, length)
    assert alone == list(range(1, len(alone) + 1))


def test_pages_freed_twice_are_an_error() -> None:
    allocator = PageAllocator(4, PAGE_SIZE)
    table: list[int] = []
    allocator.grow(table, 5)
    allocator.free(table)
    with pytest.raises(ValueError, match="page 2 is not in use"):
        allocator.free(table)


def test_a_pool_of_the_null_page_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 pages"):
        PageAllocator(1, PAGE_SIZE)


@pytest.mark.parametrize(
    ("tables", "fault"),
    [
        ([[1, 2], [2]], "count of holders"),
        ([[1]], "in no block table"),
        ([[1, 2, 3]], "in no block table"),
    ],
)
def test_the_check_finds_what_went_wrong(tables: list[list[int]], fault: str) -> None:
    allocator = PageAllocator(6, PAGE_SIZE)
    allocator.grow([], 8)
    allocator.check_integrity([[1, 2]])
    with pytest.raises(AssertionError, match=fault):
        allocator.check_integrity(tables)
