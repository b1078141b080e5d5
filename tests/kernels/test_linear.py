"""Products with packed weights: right to the bound of any summation in float32, and the same bits in every company.

Guards against tails of panels and of inputs, strides and alignments taken for granted, a kernel variant that sums in
another order (verification would round otherwise than decoding), threads that write over each other.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PackedWeight, linear, linear_reference
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

pytestmark = NATIVE
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EACH_TYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
sizes = st.one_of(st.integers(1, 100), st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 320]))
counts = st.one_of(st.integers(1, 40), st.just(200))


def make_packed(n: int, k: int, dtype: torch.dtype, seed: int = 0, has_bias: bool = True) -> PackedWeight:
    weight = make_normal(n, k, seed=seed, dtype=dtype)
    return PackedWeight.pack(weight, make_normal(n, seed=seed + 1, dtype=dtype) if has_bias else None, Arena())


def bound(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[T, n]: k products and k sums, the bias, the scale of one and the reference itself round once each."""
    size = x.abs().double() @ weight.abs().double().T
    size = size if bias is None else size + bias.abs().double()
    return (2 * x.shape[1] + 3) * ROUNDING * size


@EACH_SET
@EACH_TYPE
@settings(max_examples=40)
@given(sizes, sizes, counts, layouts, layouts, st.booleans(), thread_setups, st.integers(0, 99))
def test_right_to_the_rounding_of_any_order_of_additions(
    instruction_set: str, dtype: torch.dtype, n: int, k: int, rows: int, of_x: str, of_weight: str, has_bias: bool,
    way: ThreadSetup, seed: int,
) -> None:  # fmt: skip
    weight, x = make_normal(n, k, seed=seed, dtype=dtype), make_normal(rows, k, seed=seed + 1)
    x *= 10 ** make_normal(rows, 1, seed=seed + 2)
    bias = make_normal(n, seed=seed + 3, dtype=dtype) if has_bias else None
    made = PackedWeight.pack(change_layout(weight, of_weight), bias, Arena())
    with use_library(instruction_set, way):
        ours = linear(change_layout(x, of_x), made)
    seen = x.to(dtype)
    theirs = seen.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert ours.shape == (rows, n)
    assert ((ours - theirs).abs() <= bound(seen, weight, bias)).all()


@EACH_TYPE
@given(sizes, sizes, layouts, st.booleans(), st.integers(0, 99))
def test_the_slow_reference_is_the_product_with_the_weight_as_given(
    dtype: torch.dtype, n: int, k: int, layout: str, has_bias: bool, seed: int
) -> None:
    weight, x = make_normal(n, k, seed=seed, dtype=dtype), make_normal(3, k, seed=seed + 1)
    bias = make_normal(n, seed=seed + 3, dtype=dtype) if has_bias else None
    made = PackedWeight.pack(change_layout(weight, layout), bias, Arena())
    assert torch.equal(made.unpack(), weight)
    direct = torch.nn.functional.linear(x.to(dtype).double(), weight.double(), bias if bias is None else bias.double())
    torch.testing.assert_close(linear_reference(x, made), direct.float(), rtol=1e-6, atol=1e-12)


@EACH_SET
@EACH_TYPE
@pytest.mark.parametrize(("n", "k"), [(75, 67), (160, 32), (33, 1)])
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_others(
    instruction_set: str, dtype: torch.dtype, n: int, k: int
) -> None:
    """This is what makes speculative and plain decoding bit-equal: 8 rows are verified as one was decoded."""
    weight, x = make_packed(n, k, dtype), make_normal(200, k, seed=2)
    with use_library(instruction_set):
        alone = torch.cat([linear(row[None], weight) for row in x])
    for way in THREAD_SETUPS:
        with use_library(instruction_set, way):
            for rows in (*range(2, 41), 200):
                assert torch.equal(linear(x[:rows], weight), alone[:rows]), f"{rows} rows, {way}"
            assert torch.equal(linear(x[5:12].flip(0), weight), alone[5:12].flip(0))


@EACH_SET
@EACH_TYPE
def test_more_rows_than_a_cache_holds_change_no_bits(instruction_set: str, dtype: torch.dtype) -> None:
    """From 1 MiB of activations on, products by tiles read each block of rows once for a group of panels."""
    weight, x = make_packed(200, 1027, dtype), make_normal(531, 1027, seed=2)
    rows = [0, 1, 31, 300, 510, 529, 530]
    with use_library(instruction_set):
        alone = torch.cat([linear(x[i][None], weight) for i in rows])
    for way in THREAD_SETUPS:
        with use_library(instruction_set, way):
            assert torch.equal(linear(x, weight)[rows], alone), f"{way}"


@EACH_SET
@EACH_TYPE
def test_two_threads_give_the_bits_of_one(instruction_set: str, dtype: torch.dtype) -> None:
    """With panels enough for every member of the team to take several."""
    weight, x = make_packed(1111, 70, dtype), make_normal(9, 70, seed=2)
    with use_library(instruction_set):
        alone = linear(x, weight)
    for way in THREAD_SETUPS[1:] * 20:
        with use_library(instruction_set, way):
            assert torch.equal(linear(x, weight), alone)


@EACH_SET
@EACH_TYPE
def test_what_is_not_finite_stays_in_its_row(instruction_set: str, dtype: torch.dtype) -> None:
    weight, x = make_packed(45, 50, dtype), make_normal(8, 50, seed=2)
    spoilt = x.clone()
    spoilt[1, 3], spoilt[3, 49], spoilt[4, 0], spoilt[6] = torch.nan, torch.inf, -torch.inf, torch.inf
    with use_library(instruction_set):
        clean, ours = linear(x, weight), linear(spoilt, weight)
    theirs = linear_reference(spoilt, weight)
    whole = [0, 2, 5, 7]
    assert torch.equal(ours[whole], clean[whole])
    assert ours[1].isnan().all()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf() * ours.sign(), theirs.isinf() * theirs.sign())


@EACH_SET
@EACH_TYPE
def test_what_is_not_finite_in_a_weight_stays_in_its_output(instruction_set: str, dtype: torch.dtype) -> None:
    """Not in its panel: the outputs beside it are of other tokens."""
    weight, x = make_normal(45, 50, seed=0, dtype=dtype), make_normal(3, 50, seed=2)
    spoilt = weight.clone()
    spoilt[7, 3], spoilt[44, 49] = torch.nan, torch.inf
    with use_library(instruction_set):
        clean, ours = (linear(x, PackedWeight.pack(w, None, Arena())) for w in (weight, spoilt))
    assert ours[:, 7].isnan().all()
    assert ours[:, 44].isinf().all()
    others = [n for n in range(45) if n not in (7, 44)]
    assert torch.equal(ours[:, others], clean[:, others])


TIES = (1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-23, 3.3895313892515355e38, 65535.0, 0.0, -0.0)


@EACH_SET
@settings(max_examples=50)
@given(
    st.lists(
        st.floats(2.0**-120, 2.0**120, width=32) | st.floats(-(2.0**120), -(2.0**-120), width=32),
        min_size=33,
        max_size=33,
    )
)
def test_inputs_are_rounded_to_bfloat16_as_torch_rounds_them(instruction_set: str, numbers: list[float]) -> None:
    """Ties to even, in whole vectors and in the tail."""
    weight = PackedWeight.pack(torch.eye(33, dtype=torch.bfloat16), None, Arena())
    x = torch.tensor([numbers, [*TIES, *numbers[: 33 - len(TIES)]], [*numbers[len(TIES) :], *TIES]])
    with use_library(instruction_set):
        ours = linear(x, weight)
    assert torch.equal(ours, x.bfloat16().float())


@EACH_TYPE
def test_no_rows_give_no_results(dtype: torch.dtype) -> None:
    """A forward pass without requested logits once divided by its number of rows."""
    weight = make_packed(40, 33, dtype)
    for way in THREAD_SETUPS:
        with use_library(way=way):
            assert linear(torch.zeros(0, 33), weight).shape == (0, 40)


@pytest.mark.parametrize("has_own_pool", [False, True], ids=["shared pool", "own pool"])
def test_calls_from_several_python_threads_at_once(has_own_pool: bool) -> None:
    """A server runs steps of one model in different threads: none may write to the buffers that another reads."""
    weights = [make_packed(300 + 64 * i, 40 + i, dtype, seed=i) for i, dtype in enumerate([*DTYPES.values()] * 2)]
    inputs = [make_normal(5, 40 + i, seed=9 + i) for i in range(4)]
    expected = [linear(x, w) for x, w in zip(inputs, weights, strict=True)]

    def run(number: int) -> bool:
        return all(torch.equal(linear(inputs[number], weights[number]), expected[number]) for _ in range(60))

    with use_library(way=ThreadSetup(2, has_own_pool)):
        assert all(run_concurrently(run))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int8])
def test_weights_of_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ForedraftError, match=f"take bfloat16 and float32 weights, not {dtype}"):
        PackedWeight.pack(torch.ones(4, 4, dtype=dtype), None, Arena())


def test_a_packed_weight_is_a_copy() -> None:
    """A model that was handed over keeps its weights, and training it further changes nothing here."""
    weight, bias = make_normal(40, 20, seed=0), make_normal(40, seed=1)
    made = PackedWeight.pack(weight, bias, Arena())
    before = linear(make_normal(2, 20, seed=2), made)
    weight.zero_()
    bias.zero_()
    assert torch.equal(linear(make_normal(2, 20, seed=2), made), before)
