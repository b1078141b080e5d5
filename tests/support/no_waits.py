"""Mode in which a function may not wait for a GPU, nor copy between it and the host, as in a CUDA graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foredraft.kernels.gpu.graphs import CallingRecorder, CallingReplay, Outputs
from tests.support.pretend_gpu import PretendTensor

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select, aten.is_nonzero}
COPIES = {aten._to_copy, aten.copy_, aten.lift_fresh}
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
            assert not (packet is aten._to_copy and to_host), f"{func} copies to the host"
            if packet in (aten.index, aten.index_put_, aten.index_put):
                assert not any(x.dtype == torch.bool for x in tensors[1:]), f"{func} counts the rows of a mask"
        return func(*args, **kwargs)


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
            with NoWaits():
                return run()

        return super().record(run_strictly)
