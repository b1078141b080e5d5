"""Packed linear layers for models that run transformers' modules: each linear module is replaced by a native one."""

import copy
import warnings
from collections.abc import Callable, Sequence
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
from foredraft.kernels.quantize import PackWeight, check_quantization, multiply, select_packers
from foredraft.models.grid_linear import GridLinear, pack_joined, take_only
from foredraft.models.weight_use import WeightPlaceholder, track_weight_reads


class PackedLinear(nn.Module):
    """Linear layer y = x W^T + b by the native kernel.

    Without the kernels it runs in torch if W has 8 or 4 bits. This is slow, and the result has the same bits.
    """

    def __init__(self, packed: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed = packed
        self.in_features, self.out_features = packed.k, packed.n
        # Models read the shape and dtype of `weight`. The placeholder has no values and is not a parameter.
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
    warnings.warn("without the native kernels quantised models are slower than unquantised models", stacklevel=3)


def check_quantizable(model: Any, name: str | None) -> None:
    """Check that a model can be quantised.

    Args:
        model: transformers model.
        name: kind of quantisation; None = none.

    Raises:
        ForedraftError: the kind is unknown, or the model is not on the CPU.
    """
    check_quantization(name)
    if name is not None and model.device.type != "cpu":
        raise ForedraftError(
            f"quantization {name!r} rounds weights for the kernels of the CPU, and this model is on {model.device}; "
            "load a checkpoint that is quantised already (FP8, AWQ or GPTQ), or use device='cpu', or leave it out"
        )


def copy_structure(model: Any) -> Any:
    """Copy the modules of a model around the same tensors."""
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)


def list_packed_weights(model: nn.Module) -> list[PackedWeight]:
    """List the weights of the packed linear modules of a model."""
    return [module.packed for module in model.modules() if isinstance(module, PackedLinear)]


def pack_linears(
    model: Any,
    quantization: str | None,
    is_owned: bool,
    run_probe: Callable[[Any], object] | None = None,
    packers: tuple[PackWeight, PackWeight] | None = None,
    kept_parts: Sequence[str] = (),
) -> Any:
    """Replace the linear modules of a model by packed ones.

    Four kinds of weights stay: matrices with fewer outputs or inputs than a panel, such as routers of experts, which
    are small and sensitive to rounding; embeddings; weights outside linear modules; and weights that the model reads
    without calling their module.

    Args:
        model: transformers model.
        quantization: "int8" or "int4"; None = the weights as stored.
        is_owned: whether to change the model itself. Otherwise a copy around the same tensors is changed.
        run_probe: short forward pass that shows which weights the model reads directly. Default None = not tested.
        packers: functions that pack a matrix, and that of the head. Default None = those of `quantization`.
        kept_parts: paths of modules that stay as they are, such as an image encoder. Default () = none.

    Returns:
        The model, or its copy.
    """
    if not is_owned:
        model = copy_structure(model)
    pack, pack_head = packers or select_packers(quantization)
    arena, head = Arena(), model.get_output_embeddings()
    kinds = (nn.Linear, GridLinear, Conv1D)
    others = tuple(f"{path}." for path in kept_parts)
    linears = [
        (path, module)
        for path, module in model.named_modules()
        if type(module) in kinds and not f"{path}.".startswith(others)
    ]
    read_directly: list[nn.Module] = []
    if run_probe is not None:
        with track_weight_reads([module for _, module in linears]) as read_directly:
            run_probe(model)
    for path, module in linears:
        if any(module is other for other in read_directly):
            continue
        weight = module.weight.detach()
        weight = weight.T if type(module) is Conv1D else weight
        if min(weight.shape) < PANEL:
            continue
        pack_module = pack_head if module is head else pack
        if type(module) is GridLinear:
            packed = pack_joined([module], take_only, pack_module, module.bias, arena, is_owned)
        else:
            packed = pack_module(weight, module.bias, arena)
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear(packed, weight.dtype))
    return model
