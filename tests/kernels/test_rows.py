"""The rows of a pass in the native layout, against those of the forward batch."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.kernels.rows import PackedRows
from foredraft.models.forward_batch import ForwardBatch, Span
from tests.models.test_forward_batch import PAGE_SIZE, compute_visible_slots, spans


def pack(spans: list[Span], logit_rows: list[int] | None = None) -> PackedRows:
    return PackedRows.pack(spans, [0] if logit_rows is None else logit_rows, PAGE_SIZE)


@given(spans())
def test_every_row_sees_its_own_past_and_nothing_else(spans: list[Span]) -> None:
    rows = pack(spans)
    for row, seen in compute_visible_slots(spans, None).items():
        assert len(rows.list_slots(row)) == len(seen)
        assert set(rows.list_slots(row)) == seen


@given(spans())
def test_slots_stand_in_the_order_of_the_text(spans: list[Span]) -> None:
    """The kernel adds up in this order, and a sliding window counts from the back of it."""
    rows, row = pack(spans), 0
    for span in spans:
        for node in range(span.first_node, span.first_node + len(span.tokens)):
            path = [node]
            while span.parents is not None and span.parents[path[0]] >= 0:
                path.insert(0, span.parents[path[0]])
            if span.parents is None:
                path = list(range(node + 1))
            text = [*range(span.start), *(span.start + n for n in path)]
            assert rows.list_slots(row) == [span.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in text]
            row += 1
    assert rows.num_rows == row


@given(spans(), st.integers(0, 5))
def test_the_native_side_reads_what_the_window_says(spans: list[Span], skipped: int) -> None:
    window = ForwardBatch.build(spans, range(skipped, 9), PAGE_SIZE, "cpu")
    rows = window.packed_rows
    record = rows.record

    def numbers(address: int, count: int) -> list[int]:
        return list((ctypes.c_int32 * count).from_address(address))

    assert (record.num_rows, record.page_size, record.num_logits) == (window.num_rows, PAGE_SIZE, 9 - skipped)
    assert numbers(record.tokens, record.num_rows) == window.tokens[0].tolist()
    assert numbers(record.write_slots, record.num_rows) == window.write_slots.tolist()
    assert numbers(record.logit_rows, record.num_logits) == window.logit_rows.tolist()
    start, tail = numbers(record.num_committed, record.num_rows), numbers(record.path_length, record.num_rows)
    assert [a + b - 1 for a, b in zip(start, tail, strict=True)] == window.positions[0].tolist()
    assert record.max_keys == max(len(seen) for seen in compute_visible_slots(spans, None).values())


@given(spans())
def test_made_again_from_its_numbers_it_is_the_same(spans: list[Span]) -> None:
    """So it travels through an operator, as a tensor and a list."""
    rows = pack(spans, [3, 1, 4])
    again = PackedRows.from_numbers(rows.numbers.clone(), list(rows.counts), PAGE_SIZE)
    assert [again.list_slots(row) for row in range(again.num_rows)] == [
        rows.list_slots(row) for row in range(rows.num_rows)
    ]
    plain = [name for name, kind in type(rows.record)._fields_ if kind is ctypes.c_int32]
    assert [getattr(again.record, name) for name in plain] == [getattr(rows.record, name) for name in plain]
    assert (again.num_logits, again.counts) == (3, rows.counts)


def test_pages_beyond_the_text_are_left_out() -> None:
    """A request holds pages for a draft it may not use; the next request's table begins after what is read."""
    rows = PackedRows.pack([Span([5, 2, 9, 9], 3, [1, 2], [0, 1]), Span([7], 0, [3], [0])], [0, 2], 4)
    assert [rows.list_slots(row) for row in range(3)] == [[20, 21, 22, 23], [20, 21, 22, 23, 8], [28]]
    assert rows.numbers.dtype == torch.int32


def test_logits_of_no_rows() -> None:
    assert pack([Span([1], 0, [7], [0])], []).num_logits == 0


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_of_any_size(page_size: int) -> None:
    table = list(range(40, 2, -1))
    rows = PackedRows.pack([Span(table, 20, [7] * 3, range(3))], [0], page_size)
    assert rows.list_slots(2) == [table[i // page_size] * page_size + i % page_size for i in range(23)]
