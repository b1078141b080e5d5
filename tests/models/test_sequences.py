"""Rows as left-padded sequences: every row sees its own keys in the order of ranks, as in decoding token by token."""

from hypothesis import given
from hypothesis import strategies as st

from foredraft.kv.allocator import NULL_PAGE
from foredraft.models.forward_batch import MAX_PADDED_ROWS, ForwardBatch, Span
from foredraft.models.sequences import MAX_PADDED_KEYS, group_sequences
from tests.support.random_spans import PAGE_SIZE, spans


def list_keys(batch: ForwardBatch, is_padded: bool) -> dict[int, list[int]]:
    """Collect packed row -> slots of its keys by rank, from the tensors of the groups."""
    result: dict[int, list[int]] = {}
    for group in group_sequences(batch, is_padded):
        n = group.num_columns
        for row, (b, column) in group.columns.items():
            assert group.rows[b, column] == row
            end = group.num_keys - n + column + 1  # a causal mask hides the later keys
            slots, is_key = group.slots[b, :end].tolist(), group.key_mask[b, :end].tolist()
            assert is_key == sorted(is_key), "padding is on the left"
            assert all(slot // PAGE_SIZE == NULL_PAGE for slot, real in zip(slots, is_key, strict=True) if not real)
            result[row] = [slot for slot, real in zip(slots, is_key, strict=True) if real]
    return result


def list_expected(batch: ForwardBatch) -> list[list[int]]:
    """List the same from the definition: committed tokens, then the path down to the row."""
    rows = []
    for span in batch.spans:
        for node in span.node_indices:
            offsets = [*range(span.start), *(span.start + other for other in span.find_path(node))]
            rows.append([span.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in offsets])
    return rows


@given(spans(), st.booleans())
def test_every_row_sees_its_path_by_rank_and_writes_its_last_slot(requests: list[Span], is_padded: bool) -> None:
    batch = ForwardBatch.from_spans(requests, PAGE_SIZE, "cpu")
    keys, expected = list_keys(batch, is_padded), list_expected(batch)
    assert [keys[row] for row in range(batch.num_rows)] == expected
    groups = group_sequences(batch, is_padded)
    rows = [row for group in groups for row in group.rows.flatten()[group.real_rows].tolist()]
    assert rows == list(range(batch.num_rows)), "groups follow the packed order, so ancestors are written first"
    written = [slot for group in groups for slot in group.write_slots.tolist()]
    assert written == [slots[-1] for slots in expected]


@given(spans())
def test_without_padding_a_group_has_sequences_of_one_length(requests: list[Span]) -> None:
    for group in group_sequences(ForwardBatch.from_spans(requests, PAGE_SIZE, "cpu"), is_padded=False):
        assert group.key_mask.all()
        assert len({run.num_rows for run in group.runs}) == 1


def test_a_long_chunk_and_a_large_batch_are_divided() -> None:
    chunk = Span(list(range(1, 30)), 0, [7] * (MAX_PADDED_ROWS + 1), range(MAX_PADDED_ROWS + 1))
    short = Span([30], 0, [7, 7], range(2))
    sizes = [len(group.runs) for group in group_sequences(ForwardBatch.from_spans([chunk, short], 4, "cpu"), True)]
    assert sizes == [1, 1]
    length = MAX_PADDED_KEYS // 4
    long = [Span(list(range(1, length)), length - 1, [7], [0]) for _ in range(9)]
    sizes = [len(group.runs) for group in group_sequences(ForwardBatch.from_spans(long, 4, "cpu"), True)]
    assert sizes == [4, 4, 1]
