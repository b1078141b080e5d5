"""Check that no operator of a forward pass lets the bits of a row depend on the other rows.

The pass of a few tokens is recorded operator by operator. Operators that compute every number by itself, that copy, or
that compute with integers are known to be independent. Sums are not: cuBLAS and torch's reductions choose their order
by the number of rows. Operators within exact modules are not examined.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# Operators that make or copy tensors; each number of the result is a number of an argument, or a constant.
COPYING = frozenset(
    {
        aten.embedding, aten.cat, aten.stack, aten.index, aten.index_select, aten.gather, aten.repeat, aten.copy_,
        aten._to_copy, aten.clone, aten.fill_, aten.zero_, aten.constant_pad_nd, aten._unsafe_view, aten._reshape_copy,
        aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.zeros,
        aten.zeros_like, aten.new_zeros, aten.ones, aten.ones_like, aten.new_ones, aten.full, aten.full_like,
        aten.new_full, aten.arange, aten.scalar_tensor, aten.lift_fresh, aten.resize_,
    }
)  # fmt: skip
PRODUCTS = {aten.mm, aten.bmm}


def find_dependent_operator(
    model: nn.Module, exact: tuple[type[nn.Module], ...], run_probe: Callable[[Any], object]
) -> str | None:
    """Find an operator that may let the bits of a row depend on others.

    Args:
        model: model, of which a pass is recorded.
        exact: types of modules that are known to be independent.
        run_probe: runs a pass of the model.

    Returns:
        Description of the module and its operator; None if all are independent.
    """
    recorder = _OperatorRecorder()
    with _follow_modules(model, exact, recorder), recorder:
        run_probe(model)
    return recorder.found


class _OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that keeps the first operator that is not known to be independent."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None
        self.modules: list[tuple[str, nn.Module, bool]] = []  # that run: path, module, whether it is exact

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with self:  # under inference mode, operators such as matmul arrive before they are divided into others
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result = func(*args, **(kwargs or {}))
        is_exact = any(is_exact for _, _, is_exact in self.modules)
        if self.found is None and self.modules and not is_exact and not _is_independent(func, args, kwargs or {}):
            path, module, _ = self.modules[-1]
            self.found = f"{path or 'the model'} ({type(module).__name__}) computes {func.overloadpacket.__name__}"
        return result


@contextmanager
def _follow_modules(
    model: nn.Module, exact: tuple[type[nn.Module], ...], recorder: _OperatorRecorder
) -> Iterator[None]:
    """Keep the modules that run in `recorder.modules`."""
    handles = []
    for path, module in model.named_modules():
        entry = (path, module, isinstance(module, exact))

        def enter(_module: nn.Module, _inputs: Any, entry: Any = entry) -> None:
            recorder.modules.append(entry)

        def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
            recorder.modules.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_independent(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    packet = func.overloadpacket
    if torch.Tag.pointwise in func.tags or func.is_view or packet in COPYING:
        return True
    if packet in PRODUCTS and args[1].shape[-2] == 1:  # no sum; TF32 rounds the factors
        return str(torch.backends.cuda.matmul.fp32_precision) != "tf32"
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return bool(tensors) and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors)
