"""Paged attention: right to a derived bound, and every bit what decoding the same text alone gives.

Guards against keys of a sibling branch, of another request or of an unwritten slot; a window that slides with the
row's index in the pass instead of its position; tails of blocks and of vectors; sums that depend on the other rows.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels.attention import attend, attend_reference, can_attend
from foredraft.kernels.cpu import build
from foredraft.kernels.cpu.library import _open_library
from foredraft.kernels.cpu.records import AttentionRecord
from foredraft.kernels.rows import PackedRows
from foredraft.models.forward_batch import Span
from tests.models.test_forward_batch import PAGE_SIZE, spans
from tests.support.library_setups import (
    EACH_SET,
    LAYOUTS,
    NATIVE,
    ROUNDING,
    THREAD_SETUPS,
    ThreadSetup,
    change_layout,
    layouts,
    make_normal,
    misalign,
    replace_handle,
    run_concurrently,
    thread_setups,
    use_library,
)

pytestmark = NATIVE
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EACH_TYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
NUM_SLOTS = 200 * PAGE_SIZE


@dataclass(frozen=True)
class Case:
    """Queries [T, Hq, D], keys and values [S, Hkv, D] of every slot there is, and what to do with them."""

    query: Tensor
    keys: Tensor
    values: Tensor
    rows: PackedRows
    scale: float
    sliding: int = 0
    softcap: float = 0.0

    def run(self) -> Tensor:
        return attend(self.query, self.keys, self.values, self.rows, self.scale, self.sliding, self.softcap)

    def reference(self) -> Tensor:
        return attend_reference(self.query, self.keys, self.values, self.rows, self.scale, self.sliding, self.softcap)


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    group: int  # query heads to a key head
    width: int
    scale: float
    sliding: int
    softcap: float

    def case(self, spans: list[Span], seed: int, dtype: torch.dtype) -> Case:
        rows = PackedRows.pack(spans, [0], PAGE_SIZE)
        query = make_normal(rows.num_rows, self.kv_heads * self.group, self.width, seed=seed)
        keys, values = (make_normal(NUM_SLOTS, self.kv_heads, self.width, seed=seed + i, dtype=dtype) for i in (1, 2))
        return Case(query, keys, values, rows, self.scale, self.sliding, self.softcap)


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    width=st.integers(1, 16).map(lambda n: 16 * n),
    scale=st.sampled_from([0.05, 0.25, 1.0]),
    sliding=st.sampled_from([0, 0, 1, 2, 5, 16, 17, 100]),
    softcap=st.sampled_from([0.0, 0.0, 1.5, 30.0]),
)


def bound(case: Case) -> float:
    """Bound the error of a result, to the first order: a score off by d moves a weight by 2d of itself.

    Kernels may round queries and weights to the type of the keys and values, as the processor multiplies them so.
    """
    width, longest = case.query.shape[2], case.rows.record.max_keys
    rounding = 2.0**-8 if case.keys.dtype == torch.bfloat16 else 0.0
    size = (case.query.abs().amax(0).amax(0).double() * case.keys.abs().amax(0).amax(0).double()).sum().item()
    score = case.scale * size * ((width + 3) * ROUNDING + rounding)
    reach = 2 * min(case.scale * size, case.softcap or math.inf)  # how far a score may lie below the largest
    score += (reach + 8 * case.softcap) * ROUNDING
    weight = 2 * score + (longest + 16) * ROUNDING + rounding
    return 1.1 * case.values.abs().max().item() * (weight + longest * ROUNDING)


@EACH_SET
@EACH_TYPE
@settings(max_examples=40)
@given(spans(), shapes, layouts, thread_setups, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_right_to_the_rounding_of_the_arithmetic(
    instruction_set: str, dtype: torch.dtype, spans: list[Span], shape: Shape, layout: str, way: ThreadSetup,
    of_query: torch.dtype, seed: int,
) -> None:  # fmt: skip
    case = shape.case(spans, seed, dtype)
    case = replace(case, query=case.query.to(of_query), keys=misalign(case.keys), values=misalign(case.values))
    with use_library(instruction_set, way):
        ours = replace(case, query=change_layout(case.query, layout)).run()
    assert ours.shape == case.query.shape
    assert ours.dtype == torch.float32
    assert (ours - case.reference()).abs().max().item() <= bound(case)


@settings(max_examples=12)
@given(spans(), st.integers(1, 3), st.sampled_from([0, 3]), st.integers(0, 99))
def test_the_slow_reference_is_attention_as_torch_writes_it(
    spans: list[Span], group: int, sliding: int, seed: int
) -> None:
    case = Shape(2, group, 16, 0.3, sliding, 0.0).case(spans, seed, torch.float32)
    for row in range(case.rows.num_rows):
        seen = case.rows.list_slots(row)
        seen = seen[-sliding:] if sliding else seen
        q, k, v = case.query[row, :, None], case.keys[seen].transpose(0, 1), case.values[seen].transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None].double(), k[None].double(), v[None].double(), scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(case.reference()[row], out[0, :, 0].float(), rtol=1e-6, atol=1e-7)


def alone(case: Case, row: int, seed: int) -> Case:
    """Decode the same sequence token by token on pages of another order, in passes of this row alone."""
    seen = case.rows.list_slots(row)
    free = (torch.randperm(199, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    pages = [free.pop() for _ in range(-(-len(seen) // PAGE_SIZE))]
    rows = PackedRows.pack([Span(pages, len(seen) - 1, [7], [0])], [0], PAGE_SIZE)
    keys, values = case.keys.clone().fill_(torch.nan), case.values.clone().fill_(torch.nan)  # nothing else is read
    keys[rows.list_slots(0)], values[rows.list_slots(0)] = case.keys[seen], case.values[seen]
    return replace(case, query=case.query[row : row + 1], keys=keys, values=values, rows=rows)


@EACH_SET
@EACH_TYPE
@settings(max_examples=25)
@given(spans(), shapes, thread_setups, st.integers(0, 99))
def test_a_row_of_a_tree_has_the_bits_of_the_same_text_decoded_alone(
    instruction_set: str, dtype: torch.dtype, spans: list[Span], shape: Shape, way: ThreadSetup, seed: int
) -> None:
    """Whatever stands beside it, wherever its pages lie: what is verified is what would have been decoded."""
    case = shape.case(spans, seed, dtype)
    with use_library(instruction_set, way):
        together = case.run()
    with use_library(instruction_set):
        for row in range(0, case.rows.num_rows, 1 + case.rows.num_rows // 12):
            assert torch.equal(together[row], alone(case, row, seed).run()[0]), f"row {row}"


@EACH_SET
@EACH_TYPE
@settings(max_examples=25)
@given(spans(), shapes, st.integers(0, 99))
def test_heads_that_share_keys_have_the_bits_of_heads_with_their_own(
    instruction_set: str, dtype: torch.dtype, spans: list[Span], shape: Shape, seed: int
) -> None:
    """Up to four heads are computed together: which and how many may not show."""
    case = shape.case(spans, seed, dtype)
    own = replace(
        case,
        keys=case.keys.repeat_interleave(shape.group, 1),
        values=case.values.repeat_interleave(shape.group, 1),
    )
    with use_library(instruction_set):
        assert torch.equal(case.run(), own.run())


def long_spans(length: int) -> list[Span]:
    pages = list(range(199, 199 - length // PAGE_SIZE - 3, -1))
    return [Span(pages, length, [7] * 5, [0, 1, 1, 2, 2], [-1, 0, 0, 1, 2])]


def long_case(dtype: torch.dtype, length: int = 600) -> Case:
    return Shape(2, 3, 64, 0.125, 0, 0.0).case(long_spans(length), 5, dtype)


@pytest.fixture(scope="module")
def retuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Build the library for this processor with other choices of fused sums."""
    with use_library() as native:
        name = native.instruction_set
    library = tmp_path_factory.mktemp("retuned") / "retuned.so"
    flags = [*build.list_machine_sets().get(name, []), "--param", "avoid-fma-max-bits=512"]
    if name == "portable" or name not in build.build(library, {name: flags}):
        pytest.skip("the compiler has no such option, or this processor has no fused multiply-add")
    return name, library


@EACH_TYPE
def test_bits_do_not_depend_on_the_sums_that_a_compiler_fuses(dtype: torch.dtype, retuned: tuple[str, Path]) -> None:
    """gcc 16 leaves a long chain of fused sums unfused in some copies of a loop; this option makes older ones do so."""
    name, library = retuned
    cases = [long_case(dtype), Shape(1, 1, 64, 0.125, 0, 30.0).case(long_spans(200), 3, dtype)]
    with use_library():
        expected = [case.run() for case in cases]
    with replace_handle(_open_library(library)) as native:
        native.select(name)
        assert all(torch.equal(case.run(), e) for case, e in zip(cases, expected, strict=True))


@EACH_SET
@EACH_TYPE
@pytest.mark.parametrize("sliding", [0, 512])
def test_long_texts_and_two_threads(instruction_set: str, dtype: torch.dtype, sliding: int) -> None:
    case = replace(long_case(dtype), sliding=sliding)
    with use_library(instruction_set):
        one = case.run()
    assert (one - case.reference()).abs().max().item() <= bound(case)
    for way in THREAD_SETUPS[1:] * 5:
        with use_library(instruction_set, way):
            assert torch.equal(case.run(), one)


@EACH_SET
@EACH_TYPE
@pytest.mark.parametrize("softcap", [0.0, 50.0])
def test_scores_far_apart_neither_overflow_nor_vanish(instruction_set: str, dtype: torch.dtype, softcap: float) -> None:
    """A score of a thousand is no infinity, and a lone winner has all the weight."""
    case = replace(long_case(dtype), scale=20.0, softcap=softcap)
    with use_library(instruction_set):
        ours = case.run()
    assert ours.isfinite().all()
    if softcap:
        assert (ours - case.reference()).abs().max().item() <= bound(case)
    else:
        winner = case.values[case.rows.list_slots(0)][:, 0]
        assert (ours[0, 0] - winner.float()).abs().amax(-1).min() < 0.1


def broken(place: str, number: float, softcap: float, dtype: torch.dtype) -> tuple[Case, Case]:
    """Two requests, the first with a tree, and something not finite in the second or in a branch of the first."""
    first = Span([3, 8, 5, 12, 9, 4], 18, [7] * 4, [0, 1, 1, 2], [-1, 0, 0, 1])
    second = Span([2, 7, 11], 9, [7] * 2, [0, 1])
    case = replace(Shape(2, 5, 48, 0.2, 0, softcap).case([first, second], 3, dtype))
    query, keys, values = case.query.clone(), case.keys.clone(), case.values.clone()
    if place == "query":
        query[4, 3, 7] = number
    elif place == "key":
        keys[case.rows.list_slots(4)[5], 1, 40] = number
    elif place == "value":
        values[case.rows.list_slots(4)[2], 1, 40] = number
    else:
        sibling = case.rows.list_slots(2)[-1]  # node 2: no ancestor of node 3
        keys[sibling], values[sibling] = number, number
    return case, replace(case, query=query, keys=keys, values=values)


@EACH_SET
@EACH_TYPE
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("place", ["query", "key", "value", "sibling"])
def test_nan_spoils_the_rows_that_read_it_and_no_other(
    instruction_set: str, dtype: torch.dtype, softcap: float, place: str
) -> None:
    """Taken for a key that is masked away, a NaN once gave text instead of an error."""
    whole, spoilt = broken(place, torch.nan, softcap, dtype)
    with use_library(instruction_set):
        clean, ours = whole.run(), spoilt.run()
    assert torch.equal(ours.isnan(), spoilt.reference().isnan())
    assert ours.isnan().any()
    intact = {"query": [0, 1, 2, 3, 5], "sibling": [0, 1, 3, 4, 5]}.get(place, [0, 1, 2, 3])
    assert torch.equal(ours[intact], clean[intact])


@EACH_SET
@EACH_TYPE
def test_a_score_of_minus_infinity_has_no_weight(instruction_set: str, dtype: torch.dtype) -> None:
    case, _ = broken("query", 0.0, 0.0, dtype)
    query, keys = case.query.clone(), case.keys.clone()
    query[..., 0], keys[..., 0] = 1.0, 0.5
    keys[case.rows.list_slots(4)[3], :, 0] = -torch.inf
    case = replace(case, query=query, keys=keys)
    with use_library(instruction_set):
        ours = case.run()
    assert ours.isfinite().all()
    assert (ours - case.reference()).abs().max().item() <= bound(replace(case, keys=keys.nan_to_num(neginf=0)))


@EACH_SET
@EACH_TYPE
def test_an_infinite_score_is_no_distribution(instruction_set: str, dtype: torch.dtype) -> None:
    case, _ = broken("query", 0.0, 0.0, dtype)
    query, keys = case.query.clone(), case.keys.clone()
    query[..., 0] = 1.0
    keys[case.rows.list_slots(4)[3], :, 0] = torch.inf
    with use_library(instruction_set):
        ours = replace(case, query=query, keys=keys).run()
    assert ours[4:].isnan().all()
    assert ours[:4].isfinite().all()


@pytest.mark.parametrize("has_own_pool", [False, True], ids=["shared pool", "own pool"])
def test_calls_from_several_python_threads_at_once(has_own_pool: bool) -> None:
    cases = [long_case(dtype, 100 + 60 * i) for i, dtype in enumerate([*DTYPES.values()] * 2)]
    expected = [case.run() for case in cases]

    def run(number: int) -> bool:
        return all(torch.equal(cases[number].run(), expected[number]) for _ in range(40))

    with use_library(way=ThreadSetup(2, has_own_pool)):
        assert all(run_concurrently(run))


def test_what_another_caller_asks_for_is_his_alone() -> None:
    """Each thread of a pass has its own scratch buffer: more threads than when it was measured would write past its
    end."""
    case = long_case(torch.float32)
    record = AttentionRecord(None, None, None, None, 6, 2, 64, 0, 0, 1.0, 0.0)
    together = Barrier(4)

    def run(number: int) -> int:
        native.handle.fd_set_threads(1 + number)
        together.wait()
        return int(native.handle.fd_attend_scratch(record, case.rows.record))

    with use_library() as native:
        one, two, three, four = run_concurrently(run)
    assert two - one == three - two == four - three > 0


ACCEPTED = (torch.zeros(2, 4, 32), torch.zeros(9, 2, 32), torch.zeros(9, 2, 32))


def test_what_the_kernel_takes() -> None:
    query, keys, values = ACCEPTED
    assert can_attend(query, keys, values)
    assert can_attend(query.bfloat16(), keys.bfloat16(), values.bfloat16())
    assert all(can_attend(change_layout(query, layout), keys, values) for layout in LAYOUTS)


REFUSED = {
    "keys of a type it lacks": lambda q, k, v: (q, k.double(), v.double()),
    "values of another width": lambda q, k, v: (q, k, v[..., :16].contiguous()),
    "a width that is not whole vectors": lambda q, k, v: (q[..., :24], k[..., :24].clone(), v[..., :24].clone()),
    "keys in pieces": lambda q, k, v: (q, k.repeat(1, 1, 2)[..., :32], v),
    "values in pieces": lambda q, k, v: (q, k, v.repeat(1, 1, 2)[..., :32]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_kernel_does_not_take_is_said_before(why: str) -> None:
    assert not can_attend(*REFUSED[why](*ACCEPTED))
