"""Pretended GPU: tensors whose device is cuda:0 and whose numbers are on the CPU.

Code that mixes tensors of two devices fails on it as on a GPU, with the operator in the message. So the path of another
device runs on a machine without one: all but the kernels, the streams and the speed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from foredraft.kernels.gpu.graphs import GRAPHS_VARIABLE

aten = torch.ops.aten
DEVICE = torch.device("cuda:0")
# Operators that take tensors of two devices: copies, and indices on the CPU.
MIXING = {
    aten._to_copy,
    aten.to,
    aten.copy_,
    aten.index,
    aten.index_put_,
    aten.index_put,
    aten._index_put_impl_,
    aten.copy,
    Tensor.copy_,
    Tensor.__getitem__,
    Tensor.__setitem__,
}
UNSUPPORTED = ("not linked with support for cuda", "not supported for tensor subclasses")
TRANSFERS = {aten._to_copy, aten.to}
MATH_ATTENTION = 0  # of _fused_sdp_choice


class PretendTensor(Tensor):
    """Tensor on the pretended GPU. `inner` has its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "PretendTensor":
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=DEVICE,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"PretendTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operator(func, args, kwargs or {})


class PretendMode(TorchDispatchMode):
    """Mode in which new tensors of the device cuda are pretended ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operator(func, args, kwargs or {})


class DeviceNames(TorchFunctionMode):
    """Mode that completes the device cuda, and copies the tensors that torch.tensor makes past the other mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(_complete_device, (args, kwargs or {}))
        if func is torch.as_tensor and isinstance(args[0], PretendTensor) and kwargs.get("device") == DEVICE:
            return args[0].to(kwargs.get("dtype") or args[0].dtype)
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == DEVICE:
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:  # the function switches to the device in C++, which torch without CUDA cannot
            if not any(text in str(error) for text in UNSUPPORTED):
                raise
        return run_operator(func, args, kwargs)


def _complete_device(value: Any) -> Any:
    is_device = isinstance(value, (str, torch.device)) and str(value) in ("cuda", "cuda:0")
    return DEVICE if is_device else value


def run_operator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the numbers of its arguments, and check their devices."""
    packet = getattr(func, "overloadpacket", func)
    if packet is aten._fused_sdp_choice:
        return MATH_ATTENTION
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    on_gpu = [x for x in tensors if isinstance(x, PretendTensor)]
    if on_gpu and packet not in MIXING:
        for x in tensors:
            if not isinstance(x, PretendTensor) and x.dim() > 0:
                raise RuntimeError(f"{func} has tensors on cuda:0 and on the CPU: {[tuple(x.shape) for x in tensors]}")
    devices = [x for x in leaves if isinstance(x, torch.device)]
    is_on_gpu = devices[0].type == "cuda" if devices else bool(on_gpu)
    if packet in (aten.copy_, Tensor.copy_):
        is_on_gpu = isinstance(args[0], PretendTensor)
    wrappers = {id(x.inner): x for x in on_gpu}
    kwargs = {name: x for name, x in kwargs.items() if name != "pin_memory"}
    result = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
    if packet in TRANSFERS and is_on_gpu != bool(on_gpu):
        result = result.clone()  # a copy on another device shares no memory
    return tree_map(lambda x: _wrap(x, wrappers), result) if is_on_gpu else result


def _unwrap(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.inner if isinstance(value, PretendTensor) else value


def _wrap(value: Any, wrappers: dict[int, PretendTensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    return wrappers[id(value)] if id(value) in wrappers else PretendTensor(value)


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """Run code with a pretended GPU, without Triton kernels and CUDA graphs."""
    with (
        PretendMode(),
        DeviceNames(),
        mock.patch("foredraft.kernels.gpu.loading.explain_missing_kernels", return_value="it is pretended"),
        mock.patch.dict("os.environ", {GRAPHS_VARIABLE: "0"}),
        mock.patch.object(torch.cuda, "_lazy_init"),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(1 << 30, 1 << 30)),
        mock.patch.object(torch.cuda, "synchronize"),
        # otherwise a parameter keeps its class, which loses `inner`
        mock.patch.object(torch.__future__, "get_overwrite_module_params_on_conversion", return_value=True),
    ):
        yield
