"""Detection of linear modules whose weight a model reads directly instead of calling the module.

Routers of experts do this. A packed module has no weight to read, so such modules are not packed.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Functions and properties of a tensor that work without values.
_METADATA_FUNCTIONS: frozenset[Any] = frozenset(
    [
        *(vars(Tensor.__base__)[name].__get__ for name in ("shape", "dtype", "ndim", "requires_grad")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point),
    ]
)
_DEVICE_GETTER: Any = vars(Tensor.__base__)["device"].__get__


class WeightPlaceholder(Tensor):
    """Shape and dtype of a packed weight, without values. Any computation with it raises RuntimeError."""

    @classmethod
    def from_shape(cls, rows: int, columns: int, dtype: torch.dtype) -> "WeightPlaceholder":
        """Make a placeholder of shape [rows, columns]."""
        return torch.empty(rows, columns, dtype=dtype, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function == _DEVICE_GETTER:
            return torch.device("cpu")  # device of the packed values
        if function in _METADATA_FUNCTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise RuntimeError("the model reads directly a weight that is packed; load it with fused=False (--no-fused)")


class _TrackedWeight(Tensor):
    """Weight that records every use of its values."""

    uses: list[Any]  # the weight's module is appended at every use
    module: nn.Module  # owner of the weight

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
    """Record the modules whose weight is used outside their own forward.

    Args:
        modules: modules with a parameter `weight`.

    Yields:
        List of the modules, filled while the context is open. A module may occur several times.
    """
    used: list[nn.Module] = []
    tracked_modules = []
    for module in modules:
        weight = module._parameters["weight"]
        assert weight is not None
        tracked = weight.detach().as_subclass(_TrackedWeight)
        tracked.module, tracked.uses = module, used

        def enter(module: nn.Module, inputs: Any, weight: Tensor = weight) -> None:
            module._parameters["weight"] = weight  # type: ignore[assignment]

        def leave(module: nn.Module, inputs: Any, output: Any, tracked: Tensor = tracked) -> None:
            module._parameters["weight"] = tracked  # type: ignore[assignment]

        module._parameters["weight"] = tracked  # type: ignore[assignment]
        hooks = (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))
        tracked_modules.append((module, weight, hooks))
    try:
        yield used
    finally:
        for module, weight, hooks in tracked_modules:
            module._parameters["weight"] = weight
            for hook in hooks:
                hook.remove()
