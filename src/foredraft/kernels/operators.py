"""The kernels as torch operators with fake implementations, for torch.compile and export."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.kernels import attention
from foredraft.kernels.linear import PackedWeight
from foredraft.kernels.linear import linear as native_linear
from foredraft.kernels.rows import PackedRows

_LINEAR_SCHEMA = (
    "linear(Tensor x, Tensor data, Tensor? bias, Tensor? scale, int n, int k, int kind, int group) -> Tensor"
)
_ATTEND_SCHEMA = (
    "attend(Tensor query, Tensor keys, Tensor values, Tensor numbers, int[] counts, int page_size, float scale, "
    "int sliding, float softcap) -> Tensor"
)


def _linear(
    x: Tensor, data: Tensor, bias: Tensor | None, scale: Tensor | None, n: int, k: int, kind: int, group: int
) -> Tensor:
    out = native_linear(x.reshape(-1, k), PackedWeight(data, n, k, kind, bias, scale, group))
    return out.to(x.dtype).view(*x.shape[:-1], n)


def _linear_fake(
    x: Tensor, data: Tensor, bias: Tensor | None, scale: Tensor | None, n: int, k: int, kind: int, group: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, numbers: Tensor, counts: Sequence[int], page_size: int, scale: float,
    sliding: int, softcap: float,
) -> Tensor:  # fmt: skip
    rows = PackedRows.from_numbers(numbers, counts, page_size)
    return attention.attend(query, keys, values, rows, scale, sliding, softcap).to(query.dtype)


def _attend_fake(
    query: Tensor, keys: Tensor, values: Tensor, numbers: Tensor, counts: Sequence[int], page_size: int, scale: float,
    sliding: int, softcap: float,
) -> Tensor:  # fmt: skip
    return query.new_empty(query.shape)  # contiguous even if the queries are not


# torch looks up operators by name in its own registry; the library must live as long as the process
_registry = torch.library.Library("foredraft", "DEF")  # type: ignore[no-untyped-call]
for _schema, _run, _fake in ((_LINEAR_SCHEMA, _linear, _linear_fake), (_ATTEND_SCHEMA, _attend, _attend_fake)):
    _registry.define(_schema)  # type: ignore[no-untyped-call]
    _name = _schema.partition("(")[0]
    _registry.impl(_name, _run, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"foredraft::{_name}", _fake)


def linear(x: Tensor, weight: PackedWeight) -> Tensor:
    """Multiply [..., k] -> [..., n] in the type of x."""
    w = weight
    out: Tensor = torch.ops.foredraft.linear(x, w.data, w.bias, w.scale, w.n, w.k, w.kind, w.group)
    return out


def attend(
    query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, scale: float, sliding: int = 0, softcap: float = 0.0
) -> Tensor:
    """Compute attention [T, Hq, D] in the type of the queries; arguments as in kernels.attention."""
    numbers, counts = rows.numbers, list(rows.counts)
    out: Tensor = torch.ops.foredraft.attend(
        query, keys, values, numbers, counts, rows.record.page_size, scale, sliding, softcap
    )
    return out
