"""Mode in which a function may not wait for a GPU, nor copy between it and the host, as in a CUDA graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foredraft.kernels.gpu.graphs import CallingRecorder, CallingReplay, Outputs
from foredraft.kernels.gpu.loading import GPUKernels
from foredraft.kernels.gpu.rows import DeviceRows
from tests.support.pretend_gpu import PretendTensor
from tests.support.torch_kernels import make_torch_kernels

aten = torch.ops.aten
# Composite operators are seen as such in inference mode.
WAITS = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose, aten.nonzero, aten.argwhere,
    aten.masked_select, aten.unique_dim, aten._unique2, aten.bincount,
}  # fmt: skip
COPIES = {aten._to_copy, aten.to, aten.copy_, aten.lift_fresh}
_suspended: list[bool] = []


class NoWaits(TorchDispatchMode):
    """Mode that raises at a wait, and at a tensor whose numbers come from the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        if not _suspended:
            assert packet not in WAITS, f"{func} waits for the device"
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            # a number that becomes a part of a launch, as in x[0] = 1, is no copy
            is_number = packet is aten.lift_fresh and tensors[0].dim() == 0
            is_on_gpu = [is_number or isinstance(x, PretendTensor) for x in tensors]
            is_copy = packet in COPIES and not all(is_on_gpu)
            to_host = isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type == "cpu"
            assert not is_copy, f"{func} copies between host and device"
            assert not (packet in COPIES and to_host), f"{func} copies to the host"
            if packet in (aten.index, aten.index_put_, aten.index_put):
                assert not any(x.dtype == torch.bool for x in tensors[1:]), f"{func} counts the rows of a mask"
        return func(*args, **kwargs)


# Methods that the pretended GPU answers before operators are dispatched.
WAITING_METHODS = (
    Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__,
)  # fmt: skip


class NoWaitingMethods(TorchFunctionMode):
    """The same for methods of tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _suspended:
            assert func not in WAITING_METHODS, f"{func} waits for the device"
            is_copy = func is Tensor.copy_ and not isinstance(args[1], PretendTensor)
            assert not is_copy, f"{func} copies from the host"
        return func(*args, **(kwargs or {}))


@contextmanager
def allow_waits() -> Iterator[None]:
    """Suspend the mode, such as inside a stand-in of a kernel."""
    _suspended.append(True)
    try:
        yield
    finally:
        _suspended.pop()


class StrictRecorder(CallingRecorder):
    """Recorder that calls the function, which may not wait."""

    def record(self, run: Callable[[], Outputs]) -> CallingReplay:
        def run_strictly() -> Outputs:
            with NoWaits(), NoWaitingMethods():
                return run()

        return super().record(run_strictly)


def wrap_kernels() -> GPUKernels:
    """Make kernels on a pretended GPU. A stand-in may wait, as a kernel does not."""
    kernels = make_torch_kernels()

    def unwrap(value: Any) -> Any:
        if isinstance(value, DeviceRows):
            return replace(value, **{name: x.inner for name, x in vars(value).items() if isinstance(x, Tensor)})
        return value.inner if isinstance(value, PretendTensor) else value

    def wrap(run: Any) -> Any:
        def run_on_host(*args: Any) -> Any:
            with allow_waits():
                result = run(*map(unwrap, args))
            return None if result is None else PretendTensor(result)

        return run_on_host

    return replace(kernels, attend=wrap(kernels.attend), store=wrap(kernels.store))
