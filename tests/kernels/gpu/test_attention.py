"""Paged attention on the GPU: right within rounding, and every bit that decoding the same sequence alone gives.

Guards against keys of a sibling branch, of another request, of an unwritten slot or of the null page; a window that
is off by one; a sink that counts once per split; splits joined in another order; blocks that mix requests.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.gpu.rows import DeviceRows
from foredraft.kernels.rows import PackedRows
from foredraft.models.forward_batch import Span
from tests.models.test_forward_batch import spans as random_spans
from tests.support.gpu_cases import (
    DEVICE,
    TREE,
    TRITON,
    AttentionCase,
    Heads,
    bound_error,
    make_chain,
    make_mixed_spans,
    make_tree,
    scatter_pages,
)

pytestmark = TRITON
NO_WINDOW = 1 << 30
WHOLE, SPLITS = 0, 1 << 20  # busy_programs: one program for all splits of a row, or one per split
LAYERS = [
    Heads(1, 2, window=5),
    Heads(4, 1, 64, softcap=2.0),
    Heads(8, 1, 128, window=37, has_sinks=True),
    Heads(20, 1, 8, value_width=24, window=33, softcap=3.0, has_sinks=True),
]
WIDE = pytest.param(Heads(16, 1, 256), marks=pytest.mark.soak)
EACH_LAYER = pytest.mark.parametrize("heads", [*LAYERS, WIDE], ids=str)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@cache
def make_case(heads: Heads) -> AttentionCase:
    """Make the case of a layer; a row of a large group is a program of its own, and fewer of them do."""
    return AttentionCase.make(heads, make_mixed_spans()[: 2 if heads.group > 8 else None])


@cache
def run_case(heads: Heads, busy_programs: int) -> Tensor:
    return make_case(heads).run(busy_programs=busy_programs)


def check(case: AttentionCase, out: Tensor) -> None:
    assert out.dtype == case.query.dtype
    assert (out.double() - case.reference()).abs().max().item() <= bound_error(case)


@EACH_LAYER
def test_right_within_rounding(heads: Heads) -> None:
    check(make_case(heads), run_case(heads, SPLITS))


def test_right_with_more_lines() -> None:
    """More rows than a program of 16 lines has; `dev/gpu/run.sh` measures whether it is faster for prompts."""
    case = make_case(LAYERS[1])
    check(case, case.run(lines=64, rows=16, busy_programs=WHOLE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_right_within_the_rounding_of_half_types(dtype: torch.dtype) -> None:
    case = AttentionCase.make(Heads(8, 1, 64, window=40), make_mixed_spans()[::3], dtype)
    check(case, case.run(busy_programs=WHOLE))


@pytest.mark.soak
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 8, 20])
@pytest.mark.parametrize("width", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("window", [0, 1, 32])
def test_right_for_every_size(dtype: torch.dtype, group: int, width: int, window: int) -> None:
    heads = Heads(group, 2, width, window=window, has_sinks=bool(group % 2), softcap=float(group // 4))
    case = AttentionCase.make(heads, make_mixed_spans(width), dtype)
    for busy_programs in (WHOLE, SPLITS):
        check(case, case.run(busy_programs=busy_programs))


@pytest.mark.soak
@settings(max_examples=150)
@given(random_spans(), st.sampled_from(LAYERS), st.sampled_from(list(DTYPES.values())), st.integers(0, 99))
def test_right_for_any_batch(spans: list[Span], heads: Heads, dtype: torch.dtype, seed: int) -> None:
    pages = scatter_pages([span.num_keys for span in spans], seed)
    case = AttentionCase.make(heads, [span._replace(pages=own) for span, own in zip(spans, pages, strict=True)], dtype)
    check(case, case.run())


@EACH_LAYER
def test_one_program_and_one_per_split_give_the_same_bits(heads: Heads) -> None:
    """Rows of every layer but the first see three splits, so that both ways are taken."""
    assert torch.equal(run_case(heads, WHOLE), run_case(heads, SPLITS))


@pytest.mark.parametrize(
    ("start", "num_rows", "window", "is_split"),
    [
        (40, 1, NO_WINDOW, False),  # two splits
        (70, 1, NO_WINDOW, True),
        (70, 8, NO_WINDOW, True),
        (70, 130, NO_WINDOW, False),  # the rows alone keep the GPU busy
        (300, 1, 16, False),  # a row sees two splits at most
        (300, 1, 40, True),
    ],
)
def test_few_rows_over_many_keys_take_a_program_per_split(
    start: int, num_rows: int, window: int, is_split: bool
) -> None:
    from foredraft.kernels.gpu.attention import AttentionPlan, uses_scratch

    plan = AttentionPlan(lines=16, rows=4, tile=16, split=32, busy_programs=32)
    packed = PackedRows.pack([make_chain(range(1, 120), start, num_rows)], [0], 4)
    rows = DeviceRows.pack(packed, [num_rows], "cpu")
    assert uses_scratch(plan, rows, window, 4, 1, 8) is is_split


@EACH_LAYER
def test_a_row_has_the_bits_of_the_same_sequence_decoded_alone(heads: Heads) -> None:
    """Rows of a tree, of a chain and of a prompt, with other requests beside them and on other pages."""
    case, together = make_case(heads), run_case(heads, SPLITS)
    rows = (3, 5, 12, 18) if len(together) > 12 else (4, 5)
    for row in rows:
        assert torch.equal(together[row], case.select_row(row).run(busy_programs=WHOLE)[0]), f"row {row}"


def test_a_request_has_the_bits_it_has_without_the_others() -> None:
    case = AttentionCase.make(Heads(4, 1, window=20), make_mixed_spans()[::3], torch.bfloat16)
    together = case.run(busy_programs=WHOLE)
    assert torch.equal(together[: len(TREE)], case.select_span(0).run(busy_programs=SPLITS))
    assert torch.equal(together[len(TREE) :], case.select_span(1).run(busy_programs=WHOLE))


def test_requests_without_rows_take_no_rows_of_others() -> None:
    spans = [make_chain(pages, 5, 3) for pages in scatter_pages([8, 8])]
    case = AttentionCase.make(Heads(4), spans)
    assert torch.equal(case.run(), replace(case, counts=[0, 3, 0, 0, 3, 0]).run())


def test_a_frontier_of_a_growing_tree_sees_nodes_of_earlier_passes() -> None:
    (pages,) = scatter_pages([20])
    frontier = make_tree(pages, 11)._replace(tokens=[7, 7], node_subset=[5, 4])
    case = AttentionCase.make(Heads(4), [frontier])
    check(case, case.run())


@pytest.mark.parametrize("is_tree", [True, False], ids=["tree", "chain"])
def test_broken_values_of_a_row_reach_only_rows_that_see_them(is_tree: bool) -> None:
    """Zero times a NaN would be a NaN in the rows beside it: a plain pass without that row has none."""
    (pages,) = scatter_pages([40])
    case = AttentionCase.make(Heads(4), [make_tree(pages, 29) if is_tree else make_chain(pages, 29, 7)])
    sound = case.run()
    broken = 3  # seen by itself and node 5 in the tree, by all later rows of the chain
    slot = case.rows.list_slots(broken)[-1]
    case.values[slot, 0, 1] = torch.inf
    case.keys[slot] = torch.nan
    out = case.run()
    for row in range(len(out)):
        if slot in case.rows.list_slots(row):
            assert not out[row].isfinite().all()
        else:
            assert torch.equal(out[row], sound[row])


def test_infinite_values_alone_are_seen_in_the_output() -> None:
    (pages,) = scatter_pages([40])
    case = AttentionCase.make(Heads(4), [make_chain(pages, 29, 4)])
    case.values[case.rows.list_slots(2)[-1], 0, 1] = torch.inf
    out = case.run()
    assert out[:2].isfinite().all()
    assert not out[2].isfinite().all()
    assert not out[3].isfinite().all()


def test_what_the_kernel_does_not_take_is_refused() -> None:
    case = AttentionCase.make(Heads(4), [make_chain([1, 2], 3, 2)])
    for changes, message in (
        ({"query": case.query.double()}, "queries are torch.float64"),
        ({"keys": case.keys.bfloat16()}, r"keys torch\.bfloat16"),
        ({"keys": case.keys.new_zeros(8, 1, 512)}, "head size of 512 is above 256"),
        ({"query": case.query[:, :, :8]}, "Hkv a divisor of Hq"),
        ({"keys": case.keys.expand(-1, 3, -1), "values": case.values.expand(-1, 3, -1)}, "a divisor of Hq"),
        ({"values": case.values.repeat(1, 1, 2)[:, :, ::2]}, "values must be contiguous"),
        ({"sinks": case.query.new_zeros(3)}, "sinks must have one number for each of 4 heads"),
    ):
        if DEVICE == "cuda" and "contiguous" in message:
            continue  # a copy to the GPU is contiguous
        with pytest.raises(ForedraftError, match=message):
            replace(case, **changes).run()
