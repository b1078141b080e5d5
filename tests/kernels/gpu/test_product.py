"""Products: the results of float64, and the same bits of a row in a pass of any size and at any place."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foredraft.errors import ForedraftError
from tests.support.gpu_cases import DEVICE, TRITON

pytestmark = TRITON
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TYPE_NAMES = ["fp32", "fp16", "bf16"]
# Outputs and inputs: whole blocks and tiles; parts of both; fewer than one of each; a tile of the last split missing.
SHAPES = [(64, 64), (97, 200), (3, 5), (40, 144)]
SPLITS = [1, 2, 4]


def make_case(outputs: int, inputs: int, dtype: torch.dtype, rows: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Make rows, a weight and a bias. Rows have numbers of many sizes, so that the order of a sum shows."""
    noise = torch.Generator().manual_seed(outputs)
    x = torch.randn(rows, inputs, generator=noise) * torch.randn(rows, inputs, generator=noise).exp()
    weight, bias = torch.randn(outputs, inputs, generator=noise), torch.randn(outputs, generator=noise)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), bias.to(DEVICE, dtype)


def run(x: Tensor, weight: Tensor, bias: Tensor | None = None, splits: int = 4, inputs: int = 16) -> Tensor:
    """Multiply with short tiles, so that small weights have several splits of several tiles."""
    from foredraft.kernels.gpu.product import ProductPlan, multiply

    plan = ProductPlan.make(*weight.shape, weight.element_size())
    return multiply(x, weight, bias, replace(plan, splits=splits, inputs=inputs))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=TYPE_NAMES)
def test_equal_to_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, weight, bias = make_case(*shape, dtype, rows=19)
    for splits, added in ((1, None), (1, bias), (2, bias), (4, None)):
        wide = x.double() @ weight.double().T + (0 if added is None else added.double())
        # one rounding, which the interpreter replaces by a cut in bfloat16; and float32 sums
        sums = x.double().abs() @ weight.double().abs().T * shape[1] * torch.finfo(torch.float32).eps
        bound = wide.abs() * torch.finfo(dtype).eps + sums
        assert ((run(x, weight, added, splits).double() - wide).abs() <= bound).all()


@pytest.mark.parametrize(("dtype", "splits"), list(zip(DTYPES, (4, 1, 2), strict=True)), ids=TYPE_NAMES)
def test_a_row_has_the_same_bits_in_every_pass(dtype: torch.dtype, splits: int) -> None:
    x, weight, bias = make_case(40, 144, dtype)
    together = run(x, weight, bias, splits)
    assert len(together.unique(dim=0)) == len(together), "the rows are too simple"
    for count in (1, 2, 7, 16, 17, 33, 63):
        assert torch.equal(run(x[:count], weight, bias, splits), together[:count]), f"a pass of {count} rows"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert torch.equal(run(x[order], weight, bias, splits), together[order]), "rows at other places"
    others = x.clone()
    others[::2] = torch.nan
    assert torch.equal(run(others, weight, bias, splits)[1::2], together[1::2]), "rows beside broken ones"


@pytest.mark.parametrize("splits", SPLITS)
def test_splits_are_joined_in_order(splits: int) -> None:
    """The sums are those of the splits one after the other, and then of the bias: of large numbers, rounded at each."""
    inputs, tile = 144, 16
    x, weight, bias = make_case(40, inputs, torch.float32, rows=3)
    x *= 1 << 12
    length = -(-inputs // (tile * splits)) * tile
    parts = [run(x[:, at : at + length], weight[:, at : at + length], None, 1) for at in range(0, inputs, length)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert torch.equal(run(x, weight, bias, splits), total + bias)
    backwards = parts[-1]
    for part in parts[-2::-1]:
        backwards = backwards + part
    assert splits < 3 or not torch.equal(backwards, total), "the order does not show"


def test_any_strides_and_shapes_have_the_same_bits() -> None:
    x, weight, bias = make_case(40, 144, torch.float32)
    expected = run(x, weight, bias)
    assert torch.equal(run(x, weight.T.contiguous().T, bias), expected), "a weight that is stored by inputs"
    assert torch.equal(run(torch.cat([x, x], 1)[:, :144], weight, bias), expected), "rows with a gap"
    assert torch.equal(run(x.view(4, 16, 144), weight, bias), expected.view(4, 16, 40))
    assert run(x[:0], weight).shape == (0, 40)


def test_splits_depend_on_the_weight_alone() -> None:
    from foredraft.kernels.gpu.product import MULTIPROCESSORS, ProductPlan

    shapes = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (896, 896), (64, 64)]
    plans = [ProductPlan.make(*shape, 2) for shape in shapes]
    assert [plan.splits for plan in plans] == [4, 16, 1, 4, 1, 2, 1]
    assert {plan.lines for plan in plans} == {16}
    for (outputs, inputs), plan in zip(shapes, plans, strict=True):
        programs = -(-outputs // plan.outputs) * plan.splits
        is_short = inputs < 4096
        assert programs >= MULTIPROCESSORS or is_short
        assert programs < 2 * MULTIPROCESSORS or plan.splits == 1


def test_tensors_that_do_not_fit_are_refused() -> None:
    x, weight, bias = make_case(40, 144, torch.float32, rows=2)
    with pytest.raises(ForedraftError, match=r"rows \[2, 5\] do not fit weight \[40, 144\]"):
        run(x[:, :5], weight)
    with pytest.raises(ForedraftError, match=r"and bias \[3\]"):
        run(x, weight, bias[:3])
    with pytest.raises(ForedraftError, match=r"got torch.float32 and torch.float16"):
        run(x, weight.half())
    with pytest.raises(ForedraftError, match=r"got torch.float64"):
        run(x.double(), weight.double())
