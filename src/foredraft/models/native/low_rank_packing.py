"""LoRA adapters in the layout of a native decoder: layers that it packs as one matrix are changed as one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import DTYPE_KINDS
from foredraft.kernels.low_rank import LayerLowRanks, LowRank, LowRankLayers
from foredraft.models.adapters.lora_weights import LoraMatrices
from foredraft.models.native.causal_stack import CausalStack
from foredraft.models.native.family import FAMILIES
from foredraft.models.native.packing import JoinMatrices, list_products


def pack_adapter(model: Any, rotary: int, matrices: Mapping[str, LoraMatrices]) -> LowRankLayers:
    """Pack an adapter for a model that runs as native code.

    Args:
        model: transformers model.
        rotary: number of rotated values of a head.
        matrices: matrices by path of the module.

    Raises:
        ForedraftError: the adapter changes a module that native code does not run as a product, such as a router.
    """
    paths = {module: path for path, module in model.named_modules()}
    family = FAMILIES[model.config.get_text_config().model_type]
    arena, kind = Arena(), DTYPE_KINDS[model.dtype]
    layers: list[LayerLowRanks] = []
    widths: list[dict[str, int]] = []
    known: set[str] = set()
    for block in CausalStack.from_model(model).decoder.layers:
        layers.append({})
        widths.append({})
        for name, modules, join in list_products(block, family, rotary):
            changes = [matrices.get(paths[module]) for module in modules]
            known.update(paths[module] for module in modules)
            widths[-1][name] = modules[0].in_features
            if any(change is not None for change in changes):
                layers[-1][name] = _pack_joined(changes, [module.out_features for module in modules], join, arena)
    if left := sorted(set(matrices) - known):
        raise ForedraftError(
            f"native code cannot change {left[0]} for single requests; leave that module out of the adapter, or load "
            "the model with fused=False (--no-fused)"
        )
    return LowRankLayers.build(layers, widths, kind)


def _pack_joined(
    changes: Sequence[LoraMatrices | None], sizes: Sequence[int], join: JoinMatrices, arena: Arena
) -> LowRank:
    """Pack the changes of modules that are one product: their A below each other, their B as a block diagonal."""
    present = [change for change in changes if change is not None]
    rank, first, wide = sum(len(change.a) for change in present), 0, []
    for change, size in zip(changes, sizes, strict=True):
        b = torch.zeros(size, rank)
        if change is not None:
            b[:, first : first + len(change.a)] = change.b
            first += len(change.a)
        wide.append(b)
    return LowRank.pack(torch.cat([change.a for change in present]), join(wide), arena)
