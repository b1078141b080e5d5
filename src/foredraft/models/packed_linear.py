"""Packed matrices in a model that keeps its own modules: those of transformers are replaced, one for one."""

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import PANEL, PackedWeight
from foredraft.kernels.operators import linear
from foredraft.kernels.quantize import check_quantization, multiply, select_packers
from foredraft.models.weight_use import WeightPlaceholder, track_weight_reads


class PackedLinear(nn.Module):
    """y = x W^T + b by the native kernel. With W in 8 or 4 bits also, slowly and with the same bits, in plain torch."""

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = packed.k, packed.n
        # models ask for the shape and the type of a weight; it has no numbers, and is not a parameter
        self.weight = WeightPlaceholder.from_shape(packed.n, packed.k, dtype)
        self.bias = packed.bias

    def forward(self, x: Tensor) -> Tensor:
        if load_library() is not None:
            return linear(x, self.packed)
        _warn_slow()
        out = multiply(x.reshape(-1, x.shape[-1]), self.packed)
        return out.to(x.dtype).view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.packed.kind}"


@cache
def _warn_slow() -> None:
    warnings.warn(
        "without the native kernels quantised models are slower than the models they were made from", stacklevel=3
    )


def check_quantizable(model: Any, name: str | None) -> None:
    """Raises ForedraftError where a model cannot be quantised."""
    check_quantization(name)
    if name is not None and model.device.type != "cpu":
        raise ForedraftError(f"quantization {name} runs on the CPU; use device='cpu' or load the model without it")


def pack_linears(
    model: Any, quantization: str | None, is_owned: bool, run_probe: Callable[[Any], object] | None = None
) -> Any:
    """The model with its matrices packed; another object around the same tensors where it is not ours to change.

    Matrices of fewer than a panel's outputs or inputs (routers of experts, for one) stay as they are: they weigh
    nothing and decide much. So do embeddings, weights that no linear module holds, and weights that the model reads by
    itself, as a short pass shows (`try_out`; None = none is tried).
    """
    if not is_owned:
        shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        model = copy.deepcopy(model, shared)
    pack, pack_head = select_packers(quantization)
    arena, head = Arena(), model.get_output_embeddings()
    found = [(path, module) for path, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]
    read: list[nn.Module] = []
    if run_probe is not None:
        with track_weight_reads([module for _, module in found]) as read:
            run_probe(model)
    for path, module in found:
        if any(module is one for one in read):
            continue
        weight = module.weight.detach()
        weight = weight if type(module) is nn.Linear else weight.T
        if min(weight.shape) < PANEL:
            continue
        held = (pack_head if module is head else pack)(weight, module.bias, arena)
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear(held, weight.dtype))
    return model
