"""Padded rows: the lists of the batch, then rows that write nowhere and read one slot of the null page."""

import torch

from foredraft.kv.allocator import NULL_PAGE
from foredraft.models.forward_batch import ForwardBatch, Span
from foredraft.models.padded_rows import PaddedRows
from foredraft.models.pass_size import PassSize

PAGE_SIZE = 4


def load(batch: ForwardBatch, rows: PaddedRows | None = None) -> PaddedRows:
    """Load a batch into rows of its size, new ones by default."""
    size = PassSize.fit(batch)
    assert size is not None
    rows = rows or PaddedRows.allocate(size, 100, "cpu")
    rows.load(batch)
    return rows


def make_batch(token: int, num_nodes: int = 3) -> ForwardBatch:
    tree = Span([5, 6], 2, [token] * num_nodes, [0, 1, 1], [-1, 0, 0])
    return ForwardBatch.build([Span([9], 0, [token, 8], range(2)), tree], [1, 4], PAGE_SIZE, "cpu")


def test_rows_of_the_batch_come_first() -> None:
    rows = load(make_batch(7)).device_rows
    assert (rows.num_rows, rows.num_requests, rows.longest, rows.page_size) == (8, 3, 512, PAGE_SIZE)
    assert rows.tokens[:5].tolist() == [7, 8, 7, 7, 7]
    assert rows.positions[:5].tolist() == [0, 1, 2, 3, 3]
    assert rows.write_slots[:5].tolist() == [36, 37, 22, 23, 24]
    assert rows.logit_rows.tolist() == [1, 4]
    assert rows.first_row.tolist() == [0, 2, 5, 8]


def test_padding_writes_nowhere_and_reads_the_null_page() -> None:
    rows = load(make_batch(7)).device_rows
    assert rows.write_slots[5:].tolist() == [-1, -1, -1]
    assert rows.start[5:].tolist() == [0, 0, 0]
    assert rows.tail[5:].tolist() == [1, 1, 1]
    assert rows.positions[5:].tolist() == [0, 0, 0]
    paths = [int(rows.tails[at]) for at in rows.tail_at[5:].tolist()]
    assert paths == [NULL_PAGE * PAGE_SIZE] * 3
    assert len(set(rows.tail_at[5:].tolist())) == 1  # a chain: one program reads for all of them


def test_a_load_replaces_all_of_the_one_before() -> None:
    rows = load(make_batch(7))
    chain = Span([3, 10], 0, [1, 2, 3, 4, 5, 6], range(6))
    other = ForwardBatch.build([chain, Span([4], 1, [9], range(1))], [0, 1], PAGE_SIZE, "cpu")
    addresses = [rows.tokens.data_ptr(), rows.device_rows.tails.data_ptr()]
    again, fresh = load(other, rows), load(other)
    assert [again.tokens.data_ptr(), again.device_rows.tails.data_ptr()] == addresses
    assert torch.equal(again._block, fresh._block)


def test_a_full_size_has_no_padding() -> None:
    batch = ForwardBatch.build([Span([3], 0, [1, 2, 3, 4], range(4))], range(4), PAGE_SIZE, "cpu")
    rows = load(batch).device_rows
    assert rows.first_row.tolist() == [0, 4, 4]
    assert rows.write_slots.tolist() == [12, 13, 14, 15]
