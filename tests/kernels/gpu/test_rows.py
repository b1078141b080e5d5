"""Rows on the device: the lists of the packed rows, each at an aligned address of one block."""

import pytest
import torch
from hypothesis import given, settings

from foredraft.kernels.gpu.rows import DeviceRows
from foredraft.kernels.rows import PackedRows
from foredraft.models.forward_batch import ForwardBatch, Span
from tests.models.test_forward_batch import PAGE_SIZE, spans
from tests.support.gpu_cases import DEVICE


@settings(max_examples=20)
@given(spans())
def test_every_list_of_the_packed_rows_in_one_aligned_block(spans: list[Span]) -> None:
    batch = ForwardBatch.build(spans, [0], PAGE_SIZE, DEVICE)
    rows, packed = batch.device_rows, batch.packed_rows
    for row in range(rows.num_rows):
        start, tail, at = (int(x[row]) for x in (rows.start, rows.tail, rows.tail_at))
        table = rows.pages[int(rows.page_at[row]) :].tolist()
        slots = [table[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(start)]
        assert slots + rows.tails[at : at + tail].tolist() == packed.list_slots(row)
    assert rows.first_row.tolist() == [sum(len(span.tokens) for span in spans[:i]) for i in range(len(spans) + 1)]
    assert (rows.num_rows, rows.num_requests) == (batch.num_rows, len(spans))
    assert rows.longest == max(len(packed.list_slots(row)) for row in range(rows.num_rows))
    assert torch.equal(rows.tokens[None], batch.tokens)
    assert torch.equal(rows.positions[None], batch.positions)
    assert torch.equal(rows.write_slots, batch.write_slots)
    assert torch.equal(rows.logit_rows, batch.logit_rows)
    longs = [rows.tokens, rows.positions, rows.write_slots, rows.logit_rows]
    lists = [rows.pages, rows.page_at, rows.tails, rows.tail_at, rows.start, rows.tail, rows.first_row]
    base = lists[0].untyped_storage().data_ptr()
    assert all((x.data_ptr() - base) % 16 == 0 and x.untyped_storage().data_ptr() == base for x in longs + lists)
    assert all(x.dtype == torch.int32 for x in lists)
    assert all(x.dtype == torch.int64 for x in longs)


@settings(max_examples=10)
@given(spans())
def test_a_forward_pass_on_another_device_has_one_block_of_inputs(spans: list[Span]) -> None:
    batch = ForwardBatch.build(spans, [0], PAGE_SIZE, "meta")
    rows = batch.device_rows
    inputs = [batch.tokens, batch.positions, batch.write_slots, batch.logit_rows, rows.pages, rows.first_row]
    assert len({x.untyped_storage()._cdata for x in inputs}) == 1


def test_counts_of_other_rows_are_refused() -> None:
    packed = PackedRows.pack([Span([1], 0, [7, 7], range(2))], [0], PAGE_SIZE)
    with pytest.raises(AssertionError, match="other rows"):
        DeviceRows.pack(packed, [1], DEVICE)
