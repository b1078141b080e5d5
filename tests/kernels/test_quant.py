"""int8 and int4 weights: products within the bound of their rounding, and the same bits everywhere.

Guards against tails of panels, groups and inputs, a layout read otherwise than it was written, codes that overflow,
sums that depend on the tile a row falls into (verification would round otherwise than decoding), an instruction set or
the torch fallback that rounds otherwise than the others.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels import operators
from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PackedWeight, linear
from foredraft.kernels.quantize import (
    INT4,
    INT8,
    QuantizedWeight,
    check_quantization,
    multiply,
    pack,
    pack_codes,
    quantise,
    round_activations,
    select_packers,
    unpack,
)
from tests.support.library_setups import (
    EACH_SET,
    NATIVE,
    ROUNDING,
    THREAD_SETUPS,
    ThreadSetup,
    change_layout,
    layouts,
    make_normal,
    run_concurrently,
    thread_setups,
    use_library,
)

KINDS = {"int8": INT8, "int4": INT4}
EACH_KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
sizes = st.one_of(st.integers(1, 100), st.sampled_from([1, 3, 4, 5, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 320]))
counts = st.one_of(st.integers(1, 40), st.just(130))
groups = st.sampled_from([16, 32, 64, 128, 48])
seeds = st.integers(0, 99)


def bound(x: Tensor, q: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """[T, n]: half a step of every activation times its weight, and the rounding of the sum over groups.

    A step is the group's largest activation over 127; the quotient, its inverse and the product round too, by less than
    a hundredth of a step together.
    """
    step = round_activations(x, q.group)[1].double().repeat_interleave(q.group, 1)[:, : x.shape[1]]
    weight = q.dequantise().abs()
    rounding = 0.51 * step @ weight.T
    size = x.abs().double() @ weight.T + rounding + (0 if bias is None else bias.abs().double())
    return rounding + (step.shape[1] / q.group + 7) * 2 * ROUNDING * size + 1e-30 * weight.sum(1)


@NATIVE
@EACH_SET
@EACH_KIND
@settings(max_examples=40)
@given(sizes, sizes, counts, groups, layouts, layouts, st.booleans(), thread_setups, seeds)
def test_the_kernel_has_the_bits_of_plain_torch_and_both_are_within_the_bound(
    instruction_set: str, kind: int, n: int, k: int, rows: int, group: int, of_x: str, of_weight: str, has_bias: bool,
    way: ThreadSetup, seed: int,
) -> None:  # fmt: skip
    weight, x = make_normal(n, k, seed=seed), make_normal(rows, k, seed=seed + 1)
    x *= 10 ** make_normal(rows, 1, seed=seed + 2)
    x[:, seed % k] *= 30  # activations have outliers
    bias = make_normal(n, seed=seed + 3) if has_bias else None
    made = pack(change_layout(weight, of_weight), bias, Arena(), kind, group)
    with use_library(instruction_set, way):
        ours = linear(change_layout(x, of_x), made)
    assert torch.equal(ours, multiply(x, made))
    q = unpack(made)
    exact = x.double() @ q.dequantise().T + (0 if bias is None else bias.double())
    assert ((ours - exact).abs() <= bound(x, q, bias)).all()


@NATIVE
@EACH_SET
@EACH_KIND
@pytest.mark.parametrize(("n", "k", "group"), [(75, 67, 32), (160, 384, 64), (33, 1, 32)])
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_others(
    instruction_set: str, kind: int, n: int, k: int, group: int
) -> None:
    """This is what makes speculative and plain decoding bit-equal: 8 rows are verified as one was decoded."""
    weight, x = (
        pack(make_normal(n, k, seed=0), make_normal(n, seed=1), Arena(), kind, group),
        make_normal(130, k, seed=2),
    )
    with use_library(instruction_set):
        alone = torch.cat([linear(row[None], weight) for row in x])
    for way in THREAD_SETUPS:
        with use_library(instruction_set, way):
            for rows in (*range(2, 41), 130):
                assert torch.equal(linear(x[:rows], weight), alone[:rows]), f"{rows} rows, {way}"
            assert torch.equal(linear(x[5:12].flip(0), weight), alone[5:12].flip(0))


@NATIVE
@EACH_KIND
def test_python_threads_do_not_share_scratch(kind: int) -> None:
    weight, x = pack(make_normal(200, 96, seed=0), None, Arena(), kind), make_normal(40, 96, seed=1)
    with use_library():
        alone = linear(x, weight)
        for results in run_concurrently(lambda i: [torch.equal(linear(x[i:], weight), alone[i:]) for _ in range(20)]):
            assert all(results)


@EACH_KIND
@given(sizes, sizes, groups, seeds)
def test_what_was_packed_is_read_back_to_the_bit(kind: int, n: int, k: int, group: int, seed: int) -> None:
    q = quantise(make_normal(n, k, seed=seed), kind, group)
    found = unpack(pack_codes(q, None, Arena()))
    assert torch.equal(found.codes, q.codes)
    assert torch.equal(found.scale, q.scale)


@given(sizes, sizes, seeds)
def test_int8_rounds_to_the_nearest_of_255_numbers(n: int, k: int, seed: int) -> None:
    weight = make_normal(n, k, seed=seed)
    q = quantise(weight, INT8)
    assert q.codes.abs().amax(1).tolist() == [127] * n
    assert ((q.dequantise() - weight).abs() <= 0.5001 * q.scale[:, None]).all()


@given(sizes, sizes, groups, seeds)
def test_int4_is_within_its_step_and_no_worse_than_the_scale_that_fits(n: int, k: int, group: int, seed: int) -> None:
    weight = make_normal(n, k, seed=seed).double()
    q = quantise(weight, INT4, group)
    assert q.codes.min() >= -8
    assert q.codes.max() <= 7
    for start in range(0, k, group):
        part, ours = weight[:, start : start + group], q.dequantise()[:, start : start + group]
        largest = part.gather(1, part.abs().argmax(1, keepdim=True))
        scale = (largest / -8).bfloat16().double()
        fitting = (part / scale).round().clamp(-8, 7) * scale
        assert ((ours - part).square().sum(1) <= (fitting - part).square().sum(1) * 1.001).all()


@NATIVE
@EACH_SET
@EACH_KIND
def test_the_largest_codes_do_not_overflow(instruction_set: str, kind: int) -> None:
    """255 times 127 twice is more than 16 bits hold, and 1024 times it is near what float32 counts."""
    for group in (32, 1024):
        for sign in (1.0, -1.0):
            weight = pack(sign * torch.ones(33, 1024), None, Arena(), kind, group)
            x = torch.tensor([[3.0], [-3.0]]).expand(2, 1024)
            with use_library(instruction_set):
                ours = linear(x, weight)
            assert torch.equal(ours, multiply(x, weight))
            torch.testing.assert_close(ours, sign * x[:, :1].expand(2, 33) * 1024, rtol=0.01, atol=0)


@NATIVE
@EACH_SET
@EACH_KIND
def test_what_is_not_finite_makes_its_row_nan_and_no_other(instruction_set: str, kind: int) -> None:
    weight, x = pack(make_normal(45, 50, seed=0), None, Arena(), kind), make_normal(8, 50, seed=2)
    spoilt = x.clone()
    spoilt[1, 3], spoilt[3, 49], spoilt[4, 0], spoilt[6] = torch.nan, torch.inf, -torch.inf, torch.inf
    with use_library(instruction_set):
        clean, ours = linear(x, weight), linear(spoilt, weight)
    assert torch.equal(ours[[0, 2, 5, 7]], clean[[0, 2, 5, 7]])
    assert ours[[1, 3, 4, 6]].isnan().all()
    assert multiply(spoilt, weight)[[1, 3, 4, 6]].isnan().all()


@NATIVE
@EACH_SET
@EACH_KIND
def test_zeros_and_numbers_too_small_for_a_scale(instruction_set: str, kind: int) -> None:
    x = torch.zeros(5, 70)
    x[1], x[2, 3], x[3, :40] = 1e-38, 1e-42, 1e-29
    x[4, 60] = 1e30
    weights = make_normal(40, 70, seed=0)
    weights[3], weights[4] = 0, 1e-40
    made = pack(weights, None, Arena(), kind)
    with use_library(instruction_set):
        ours = linear(x, made)
    assert torch.equal(ours, multiply(x, made))
    assert ours[:, 3:5].abs().max() == 0
    assert ours[0].abs().max() == 0
    assert ours.isfinite().all()


@NATIVE
@EACH_KIND
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_operator_keeps_shape_and_type(kind: int, dtype: torch.dtype) -> None:
    made = pack(make_normal(45, 50, seed=0), make_normal(45, seed=1), Arena(), kind)
    x = make_normal(6, 50, seed=2, dtype=dtype).view(2, 3, 50)
    assert torch.equal(operators.linear(x, made), multiply(x.view(6, 50), made).to(dtype).view(2, 3, 45))


@EACH_KIND
def test_a_weight_that_is_not_finite_is_refused(kind: int) -> None:
    weight = make_normal(40, 40, seed=0)
    for spoiler in (torch.nan, torch.inf, -torch.inf):
        weight[7, 3] = spoiler
        with pytest.raises(ForedraftError, match="not finite"):
            quantise(weight, kind)


def test_the_last_matrix_has_eight_bits_in_both() -> None:
    weight = make_normal(40, 40, seed=0)
    kinds = {name: [pack(weight, None, Arena()).kind for pack in select_packers(name)] for name in ("int8", "int4")}
    assert kinds == {"int8": [INT8, INT8], "int4": [INT4, INT8]}
    assert select_packers(None) == (PackedWeight.pack, PackedWeight.pack)


@pytest.mark.parametrize("name", ["int3", "INT8", "", "fp8", "awq"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ForedraftError, match=f"unknown quantization '{name}'; use int8 or int4"):
        check_quantization(name)
