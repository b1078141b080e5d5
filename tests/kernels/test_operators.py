"""The kernels as torch operators: torch.compile and export see through them and get what a direct call gives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from foredraft.kernels import attention, linear, operators
from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PackedWeight
from foredraft.kernels.rows import PackedRows
from foredraft.models.forward_batch import Span
from tests.support.library_setups import NATIVE, change_layout, make_normal

pytestmark = NATIVE
ROWS = PackedRows.pack([Span([3, 1], 5, [1, 2], [0, 1]), Span([2], 0, [4], [0])], [0], 4)
SHAPES = {"one text": (5, 33), "a batch": (2, 3, 33), "one row": (33,), "no rows": (0, 33)}


def make_packed(dtype: torch.dtype, has_bias: bool = True) -> PackedWeight:
    bias = make_normal(70, seed=1, dtype=dtype) if has_bias else None
    return PackedWeight.pack(make_normal(70, 33, seed=0, dtype=dtype), bias, Arena())


def linear_arguments(x: Tensor, w: PackedWeight) -> tuple[object, ...]:
    return x, w.data, w.bias, w.scale, w.n, w.k, w.kind, w.group


def attend_arguments(query: Tensor, dtype: torch.dtype, sliding: int = 0, softcap: float = 0.0) -> tuple[object, ...]:
    keys, values = make_normal(16, 2, 32, seed=1, dtype=dtype), make_normal(16, 2, 32, seed=2, dtype=dtype)
    return query, keys, values, ROWS.numbers, list(ROWS.counts), 4, 0.2, sliding, softcap


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_finds_no_fault_with_linear(shape: str, dtype: torch.dtype, has_bias: bool) -> None:
    x = make_normal(*SHAPES[shape], seed=3, dtype=dtype)
    torch.library.opcheck(torch.ops.foredraft.linear.default, linear_arguments(x, make_packed(dtype, has_bias)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["as it is", "transposed", "every other"])
def test_torch_finds_no_fault_with_attend(layout: str, dtype: torch.dtype) -> None:
    """Queries are transposed and the result is not: a fake with the wrong layout breaks what follows."""
    query = change_layout(make_normal(3, 4, 32, seed=3, dtype=dtype), layout)
    torch.library.opcheck(torch.ops.foredraft.attend.default, attend_arguments(query, dtype, 3, 20.0))


@pytest.mark.parametrize("of_x", [torch.bfloat16, torch.float32, torch.float64])
def test_linear_gives_what_a_direct_call_gives_in_the_type_of_its_input(of_x: torch.dtype) -> None:
    weight = make_packed(torch.float32)
    for shape in SHAPES.values():
        x = make_normal(*shape, seed=3, dtype=of_x)
        ours = operators.linear(x, weight)
        direct = linear.linear(x.reshape(-1, 33), weight).to(of_x)
        assert ours.dtype == of_x
        assert ours.shape == (*shape[:-1], 70)
        assert torch.equal(ours.view(-1, 70), direct)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attend_gives_what_a_direct_call_gives_in_the_type_of_its_queries(dtype: torch.dtype) -> None:
    query = make_normal(3, 4, 32, seed=3, dtype=dtype)
    _, keys, values, *_ = attend_arguments(query, dtype)
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    ours = operators.attend(query, keys, values, ROWS, 0.2, 3, 20.0)
    assert ours.dtype == dtype
    assert torch.equal(ours, attention.attend(query, keys, values, ROWS, 0.2, 3, 20.0).to(dtype))


class Block(nn.Module):
    """A function of both operators, with arithmetic of torch around them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.project = PackedWeight.pack(make_normal(128, 24, seed=0, dtype=dtype), None, Arena())
        self.out = PackedWeight.pack(make_normal(24, 128, seed=1, dtype=dtype), None, Arena())

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        query = operators.linear(x, self.project).view(-1, 4, 32).transpose(0, 1).relu().transpose(0, 1)
        mixed = operators.attend(query, keys, values, ROWS, 0.2)
        return x + operators.linear(mixed.flatten(1), self.out)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    _, keys, values, *_ = attend_arguments(make_normal(1, seed=0), dtype)
    assert isinstance(keys, Tensor)
    assert isinstance(values, Tensor)
    return make_normal(3, 24, seed=4, dtype=dtype), keys, values


WAYS_TO_COMPILE: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "compiled": lambda block, _: torch.compile(block, fullgraph=True, backend="aot_eager"),
    "exported": lambda block, example: torch.export.export(block, example).module(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", WAYS_TO_COMPILE)
@torch.inference_mode()
def test_compiled_whole_it_gives_the_same(how: str, dtype: torch.dtype) -> None:
    """There is no break in the graph: with a break, the fakes would never be called."""
    block, example = Block(dtype).eval(), inputs(dtype)
    torch.compiler.reset()
    made = WAYS_TO_COMPILE[how](block, example)
    assert torch.equal(made(*example), block(*example))
    other = tuple(x + 1 for x in example)
    assert torch.equal(made(*other), block(*other))
