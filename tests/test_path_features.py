"""Hidden states that are noted by reference: what is read later, and what a reference keeps in memory."""

import pytest
import torch

from foredraft.path_features import MAX_REFERENCED_ROWS, FeatureRows, PathFeatures, read_all

ROWS = torch.arange(7.0)[:, None] * 10 + torch.arange(4.0)  # [7, 4]: trees of 3 and 4 nodes
STEP = PathFeatures.from_pass(ROWS, [3, 4], [[0, 2], [0]])


def test_rows_are_those_of_the_paths() -> None:
    assert torch.equal(STEP.get_rows(0).read(), ROWS[[0, 2]])
    assert torch.equal(STEP.get_rows(1).read(), ROWS[3:4])
    assert torch.equal(STEP.gather(), torch.stack([ROWS[[0, 2]], torch.stack([ROWS[3], torch.zeros(4)])]))
    assert torch.equal(STEP.keep(0, 1).read(), ROWS[2:3])
    assert torch.equal(STEP.truncate([1, 0]).gather(), torch.stack([ROWS[:1], torch.zeros(1, 4)]))
    single = PathFeatures.from_pass(ROWS, [7], [[0, 1, 2]])
    assert single.gather().data_ptr() == ROWS.data_ptr(), "a chain needs no copy"
    assert torch.equal(read_all([single.keep(0), STEP.keep(0)]), ROWS[[0, 1, 2, 0, 2]])


def test_a_part_reads_its_own_layers() -> None:
    other = STEP.select_layers((1,), 2)
    assert torch.equal(other.gather(), STEP.gather()[..., 2:])
    assert torch.equal(other.truncate([1, 1]).keep(1).read(), ROWS[3:4, 2:])
    with pytest.raises(ValueError, match="already"):
        other.select_layers((0,), 1)


def test_padded_features_come_back() -> None:
    features = torch.randn(2, 3, 4)
    step = PathFeatures.from_padded(features, [3, 1])
    assert torch.equal(step.gather()[0], features[0])
    assert torch.equal(step.gather()[1], torch.cat([features[1, :1], torch.zeros(2, 4)]))


@pytest.mark.parametrize(
    ("sizes", "count", "is_reference"),
    [
        ([MAX_REFERENCED_ROWS - 1, 1], None, True),  # few rows
        ([1000, 1], None, False),  # another request's prompt
        ([1, 1000], None, True),  # its own prompt
        ([1, 1000], 1, False),  # the last row of its own prompt
        ([2] * 200, None, True),  # a large batch
    ],
)
def test_a_reference_keeps_few_other_rows(sizes: list[int], count: int | None, is_reference: bool) -> None:
    rows = torch.randn(sum(sizes), 2)
    step = PathFeatures.from_pass(rows, sizes, [list(range(n)) for n in sizes])
    last = len(sizes) - 1
    kept = step.keep(last, count)
    first = sum(sizes) - (count or sizes[-1])
    assert torch.equal(kept.read(), rows[first:])
    assert (kept.rows is rows) == is_reference
    if not is_reference:
        assert kept.rows.untyped_storage().nbytes() == kept.read().nbytes


def test_no_rows_are_read_as_none() -> None:
    assert FeatureRows(ROWS, []).read().shape == (0, 4)
