"""Loading of LoRA adapters that requests name: the model stays as it is, and a pass adds their changes to rows."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.linear import DTYPE_KINDS, PackedWeight
from foredraft.kernels.linear import linear as native_linear
from foredraft.loaded_adapter import LoadedAdapter, LowRankProduct
from foredraft.models.adapters.lora_weights import LinearShape, LoraMatrices, read_lora
from foredraft.models.exact_modules import ExactLinear
from foredraft.models.grid_linear import GridLinear
from foredraft.models.hf import HFModel
from foredraft.models.native.low_rank_packing import pack_adapter
from foredraft.models.packed_linear import PackedLinear

KEY_BYTES = 16
LINEAR_TYPES = (nn.Linear, GridLinear, Conv1D, PackedLinear, ExactLinear)

Product = Callable[[Tensor], Tensor]  # [T, k] -> [T, n]


def add_adapter(target: HFModel, name: str, folder: str | Path) -> LoadedAdapter:
    """Load an adapter and add it to those of a target.

    Args:
        target: target; its weights stay as they are.
        name: name of the adapter in requests.
        folder: folder of the adapter.

    Raises:
        ForedraftError: the name is taken, the folder holds no adapter of this model, or the target takes no adapters.
    """
    target.adapters.check_free(name)
    if (obstacle := target.adapter_obstacle) is not None:
        raise ForedraftError(
            f"requests to {target.name} cannot have adapters, because {obstacle}; merge the adapter into the model "
            "(PEFT's merge_and_unload, then save_pretrained), and give that folder"
        )
    model = target.model
    modules = {path: module for path, module in model.named_modules() if type(module) in LINEAR_TYPES}
    output = model.get_output_embeddings()
    head = next((path for path, module in modules.items() if module is output), None)
    shapes = [LinearShape(path, *_read_shape(module)) for path, module in modules.items()]
    matrices = read_lora(folder, shapes, head, model.dtype, target.name)
    key = os.urandom(KEY_BYTES)
    if target.fused is not None:
        native = pack_adapter(model, target.fused.record.rotary, matrices)
        adapter = LoadedAdapter(name, key, native.num_bytes, native)
    else:
        adapter = _load_for_modules(name, key, modules, matrices)
        target.adapters.changes.install(model, list(matrices))
    target.adapters.add(adapter)
    return adapter


def _read_shape(module: Any) -> tuple[int, int]:
    """Return the outputs and the inputs of a linear module. Native code may have freed its weight."""
    if isinstance(module, Conv1D):
        return int(module.nf), int(module.nx)
    if isinstance(module, ExactLinear):
        n, k = module.weight.T.shape if module.has_transposed_weight else module.weight.shape
        return n, k
    return module.out_features, module.in_features


def _load_for_modules(
    name: str, key: bytes, modules: Mapping[str, nn.Module], matrices: Mapping[str, LoraMatrices]
) -> LoadedAdapter:
    """Make an adapter for transformers' modules."""
    products: dict[str, LowRankProduct] = {}
    num_bytes = 0
    for path, change in matrices.items():
        make = _choose_product(modules[path])
        weight = next(modules[path].parameters(), change.a)
        a, b = (matrix.to(weight.device, change.a.dtype) for matrix in (change.a, change.b))
        products[path] = partial(_multiply_twice, make(a), make(b))
        num_bytes += a.nbytes + b.nbytes
    return LoadedAdapter(name, key, num_bytes, modules=products)


def _multiply_twice(first: Product, second: Product, x: Tensor) -> Tensor:
    return second(first(x))


def _choose_product(module: nn.Module) -> Callable[[Tensor], Product]:
    """Choose a product that keeps what the module promises: rows whose bits do not depend on each other."""
    if isinstance(module, ExactLinear):
        multiply = module.multiply
        return lambda weight: lambda x: multiply(x, weight, None)
    if isinstance(module, PackedLinear) and load_library() is not None:
        return _make_native_product
    return lambda weight: lambda x: F.linear(x, weight)


def _make_native_product(weight: Tensor) -> Product:
    dtype = weight.dtype if weight.dtype in DTYPE_KINDS else torch.float32
    packed = PackedWeight.pack(weight.to(dtype).contiguous(), None, Arena())
    return lambda x: native_linear(x, packed)
