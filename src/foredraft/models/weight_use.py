"""Weights of linear modules that a model reads by itself, instead of calling the module.

Routers of experts do that. A packed module has no weight to read, so those modules stay as they are.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# What a model may ask of a weight that has no numbers.
_METADATA_FUNCTIONS: frozenset[Any] = frozenset(
    [
        *(vars(Tensor.__base__)[name].__get__ for name in ("shape", "dtype", "ndim", "requires_grad")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point),
    ]
)
_DEVICE_GETTER: Any = vars(Tensor.__base__)["device"].__get__


class WeightPlaceholder(Tensor):
    """Shape and type of a packed weight. Raises RuntimeError if a model calculates with it."""

    @classmethod
    def from_shape(cls, rows: int, columns: int, dtype: torch.dtype) -> "WeightPlaceholder":
        return torch.empty(rows, columns, dtype=dtype, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function == _DEVICE_GETTER:
            return torch.device("cpu")  # where the packed numbers are
        if function in _METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise RuntimeError("the model reads by itself a weight that is packed; load it with fused=False (--no-fused)")


class _TrackedWeight(Tensor):
    """A weight that notes every use of it."""

    uses: list[Any]
    module: nn.Module

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function not in _METADATA_FUNCTIONS and function != _DEVICE_GETTER:
                for value in (*args, *(kwargs or {}).values()):
                    if isinstance(value, cls):
                        value.uses.append(value.module)
            return function(*args, **(kwargs or {}))


@contextmanager
def track_weight_reads(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yields a list that collects the modules whose weight is used outside their own forward, while it is open."""
    found: list[nn.Module] = []
    closers = []
    for module in modules:
        own = module._parameters["weight"]
        assert own is not None
        seen = own.detach().as_subclass(_TrackedWeight)
        seen.module, seen.uses = module, found

        def enter(module: nn.Module, inputs: Any, own: Tensor = own) -> None:
            module._parameters["weight"] = own  # type: ignore[assignment]

        def leave(module: nn.Module, inputs: Any, output: Any, seen: Tensor = seen) -> None:
            module._parameters["weight"] = seen  # type: ignore[assignment]

        module._parameters["weight"] = seen  # type: ignore[assignment]
        hooks = (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))
        closers.append((module, own, hooks))
    try:
        yield found
    finally:
        for module, own, hooks in closers:
            module._parameters["weight"] = own
            for hook in hooks:
                hook.remove()
