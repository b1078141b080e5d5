"""Attention of many rows: every bit is that of the row alone, for all formats of keys and values.

Guards against sums whose order depends on the rows beside a row, keys of one branch that weigh in another, masks that
are off by one at the edges of tiles, and values of unseen keys that are not finite.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foredraft.kernels.attention import attend, attend_reference, pack_codes
from foredraft.kernels.rows import PackedRows
from foredraft.models.forward_batch import Span
from tests.support.library_setups import (
    EACH_SET,
    EMULATED,
    INSTRUCTION_SETS,
    NATIVE,
    THREAD_SETUPS,
    make_normal,
    use_library,
)

pytestmark = NATIVE
PAGE_SIZE, OTHER_PAGE_SIZE, SLOTS = 16, 5, 2600
FORMATS = ("bf16", "fp32", "int8")
EACH_FORMAT = pytest.mark.parametrize("form", FORMATS)


@dataclass(frozen=True)
class BlockCase:
    """Rows of one or more requests, and what their attention does."""

    num_rows: int
    committed: int
    is_tree: bool = False
    heads: tuple[int, int, int] = (6, 2, 64)  # query heads, key heads, width
    sliding: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    bias_length: int = 0
    num_requests: int = 1
    scale: float = 0.3

    def pack(self) -> PackedRows:
        spans, page = [], 1
        for _ in range(self.num_requests):
            count = -(-(self.committed + self.num_rows) // PAGE_SIZE)
            pages = list(range(page, page + count))
            page += count
            parents = None
            if self.is_tree:
                noise = torch.rand(self.num_rows, generator=torch.Generator().manual_seed(self.num_rows))
                parents = [-1] + [int(max(0, i - 6) + noise[i] * min(i, 6)) for i in range(1, self.num_rows)]
            spans.append(Span(pages, self.committed, [7] * self.num_rows, list(range(self.num_rows)), parents))
        return PackedRows.pack(spans, [0], PAGE_SIZE)


@dataclass(frozen=True)
class Inputs:
    """Queries [T, Hq, D], float32 keys and values [S, Hkv, D], and the options of a case."""

    case: BlockCase
    rows: PackedRows
    query: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def make(cls, case: BlockCase, seed: int = 0) -> "Inputs":
        rows = case.pack()
        heads, kv_heads, width = case.heads
        keys, values = (make_normal(SLOTS, kv_heads, width, seed=seed + i) for i in (1, 2))
        return cls(case, rows, make_normal(rows.num_rows, heads, width, seed=seed), keys, values)

    def alone(self, row: int) -> "Inputs":
        """Return the same sequence with one row in the pass, on pages of another size in another order."""
        seen = self.rows.list_slots(row)
        free = (torch.randperm(SLOTS // OTHER_PAGE_SIZE, generator=torch.Generator().manual_seed(row))).tolist()
        pages = free[: -(-len(seen) // OTHER_PAGE_SIZE)]
        rows = PackedRows.pack([Span(pages, len(seen) - 1, [7], [0])], [0], OTHER_PAGE_SIZE)
        keys, values = self.keys.clone().fill_(torch.nan), self.values.clone().fill_(torch.nan)
        keys[rows.list_slots(0)], values[rows.list_slots(0)] = self.keys[seen], self.values[seen]
        return replace(self, rows=rows, query=self.query[row : row + 1], keys=keys, values=values)

    def run(self, form: str) -> Tensor:
        return attend(self.query, store(self.keys, form), store(self.values, form), self.rows, **self._options())

    def reference(self, form: str) -> Tensor:
        keys, values = read(self.keys, form), read(self.values, form)
        return attend_reference(self.query, keys, values, self.rows, **self._options())

    def _options(self) -> dict[str, Any]:
        case, heads = self.case, self.case.heads[0]
        bias = make_normal(heads, case.bias_length + 1, seed=7) if case.bias_length else None
        sinks = make_normal(heads, seed=8) if case.has_sinks else None
        return {"scale": case.scale, "sliding": case.sliding, "softcap": case.softcap, "bias": bias, "sinks": sinks}


def store(x: Tensor, form: str) -> Tensor:
    return pack_codes(x) if form == "int8" else x.bfloat16() if form == "bf16" else x


def read(x: Tensor, form: str) -> Tensor:
    """Return the numbers [S, Hkv, D] that a pool has after storing."""
    if form != "int8":
        return store(x, form).float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


CASES = {
    "1 row": BlockCase(1, 70),
    "2 rows without committed tokens": BlockCase(2, 0),
    "3 rows": BlockCase(3, 31),
    "7 rows of two requests": BlockCase(7, 40, num_requests=2),
    "tree of 8": BlockCase(8, 45, is_tree=True),
    "tree of 17, window": BlockCase(17, 61, is_tree=True, sliding=19),
    "tree of 64": BlockCase(64, 33, is_tree=True),
    "tree of 64 on an empty cache, sinks": BlockCase(64, 0, is_tree=True, has_sinks=True),
    "300 rows": BlockCase(300, 5),
    "64 rows, window": BlockCase(64, 100, sliding=33),
    "17 rows, cap": BlockCase(17, 90, softcap=2.0),
    "17 rows, bias by distance": BlockCase(17, 50, bias_length=24),
    "8 rows, bias, window, sinks": BlockCase(8, 60, bias_length=9, sliding=20, has_sinks=True),
    "8 rows of 40 heads on one": BlockCase(8, 50, heads=(40, 1, 32)),
    "17 rows with their own heads, 96 wide": BlockCase(17, 37, heads=(3, 3, 96)),
    "tree of 17, 80 wide": BlockCase(17, 37, is_tree=True, heads=(6, 2, 80)),
    "tree of 8, 16 wide": BlockCase(8, 37, is_tree=True, heads=(10, 2, 16)),
    "5 rows, 128 wide": BlockCase(5, 100, heads=(7, 1, 128)),
}
LONG_CASES = {  # which the tiles, emulated, take minutes for
    "6 rows, window": BlockCase(6, 2300, sliding=2111, heads=(5, 1, 64)),
    "8 rows, bias, window, sinks": BlockCase(8, 600, bias_length=9, sliding=302, has_sinks=True),
    "17 rows, cap, 96 wide": BlockCase(17, 901, softcap=2.0, heads=(3, 3, 96)),
    "8 rows of 40 heads on one": BlockCase(8, 700, heads=(40, 1, 32)),
    "32 rows of 12 heads": BlockCase(32, 2300, heads=(12, 4, 64), scale=0.1),
    "tree of 8": BlockCase(8, 2101, is_tree=True),
    "tree of 8, 128 wide": BlockCase(8, 1800, is_tree=True, heads=(7, 1, 128)),
    "tree of 17, window": BlockCase(17, 1400, is_tree=True, sliding=777),
    "tree of 64": BlockCase(64, 333, is_tree=True),
    "7 rows of two requests": BlockCase(7, 500, num_requests=2),
}


def check_bits(case: BlockCase, form: str, instruction_set: str, num_checked: int) -> None:
    """Compare rows of a pass with the same rows alone, and the pass with itself on other threads."""
    inputs = Inputs.make(case)
    with use_library(instruction_set):
        together = inputs.run(form)
        step = 1 + inputs.rows.num_rows // num_checked
        for row in {*range(0, inputs.rows.num_rows, step), inputs.rows.num_rows - 1}:
            assert torch.equal(together[row], inputs.alone(row).run(form)[0]), f"row {row}"
    for way in THREAD_SETUPS[1:]:
        with use_library(instruction_set, way):
            assert torch.equal(inputs.run(form), together)


@EACH_SET
@EACH_FORMAT
@pytest.mark.parametrize("title", CASES)
def test_every_row_of_a_block_has_the_bits_of_the_row_alone(title: str, form: str, instruction_set: str) -> None:
    check_bits(CASES[title], form, instruction_set, 4 if instruction_set in (EMULATED, "portable") else 24)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@EACH_FORMAT
@pytest.mark.parametrize("title", LONG_CASES)
def test_every_row_over_many_keys_has_the_bits_of_the_row_alone(title: str, form: str, instruction_set: str) -> None:
    """Weights are rounded to bf16, which hides an order of sums unless there are many weights."""
    check_bits(LONG_CASES[title], form, instruction_set, 4 if instruction_set == "portable" else 24)


@EACH_SET
@EACH_FORMAT
@pytest.mark.parametrize("title", CASES)
def test_rows_of_a_block_are_right(title: str, form: str, instruction_set: str) -> None:
    inputs = Inputs.make(CASES[title])
    with use_library(instruction_set):
        ours = inputs.run(form)
    limit = 1e-4 if form == "fp32" else 0.1  # queries and weights may be rounded like keys and values
    error = ours - inputs.reference(form)
    assert error.abs().max().item() <= limit
    assert error.pow(2).mean().sqrt().item() <= limit / 8


@EACH_SET
@pytest.mark.parametrize("form", ["bf16", "fp32"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("is_tree", [False, True], ids=["prompt", "tree"])
@pytest.mark.parametrize("committed", [50, 90])
def test_an_unseen_value_that_is_not_finite_changes_no_bit(
    committed: int, is_tree: bool, number: float, form: str, instruction_set: str
) -> None:
    """Tiles multiply it by a weight of zero, which is not zero."""
    inputs = Inputs.make(BlockCase(20, committed, is_tree=is_tree))
    slot = inputs.rows.list_slots(9)[-1]
    values = inputs.values.clone()
    values[slot, 1, 3] = number
    sees = [slot in inputs.rows.list_slots(row) for row in range(20)]
    with use_library(instruction_set):
        clean, ours = inputs.run(form), replace(inputs, values=values).run(form)
    blind = [row for row, seen in enumerate(sees) if not seen]
    assert len(blind) > 5
    assert torch.equal(ours[blind], clean[blind])
    assert not ours[9].isfinite().all()


def test_blocks_are_smaller_where_their_scores_would_take_too_much_memory() -> None:
    """A block of 32 queries over more than 131,072 keys; the scores of a member are at most 16 MB."""
    committed, num_rows = 140_000, 20
    count = -(-(committed + num_rows) // PAGE_SIZE)
    keys, values = (make_normal((count + 1) * PAGE_SIZE, 1, 32, seed=i).bfloat16() for i in (1, 2))
    query = make_normal(num_rows, 3, 32, seed=0)
    pages = list(range(1, count + 1))
    rows = PackedRows.pack([Span(pages, committed, [7] * num_rows, list(range(num_rows)))], [0], PAGE_SIZE)
    together = attend(query, keys, values, rows, scale=0.3)
    for row in (0, 7, 19):
        alone = PackedRows.pack([Span(pages, committed + row, [7], [0])], [0], PAGE_SIZE)
        assert torch.equal(attend(query[row : row + 1], keys, values, alone, scale=0.3)[0], together[row])
