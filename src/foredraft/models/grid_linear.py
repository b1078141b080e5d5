"""Linear layers that keep the grid of a quantised checkpoint, so that packing them rounds no weight again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PackedWeight
from foredraft.kernels.quantize import INT4, PackWeight, QuantizedWeight, pack_codes

JoinRows = Callable[[Sequence[Tensor]], Tensor]  # joins matrices with equal rows to one


class GridLinear(nn.Linear):
    """Linear layer with codes and scales beside its weight, for the kernels of `kernels/quantize.py`."""

    grid: QuantizedWeight | None = None  # None = freed after packing

    @classmethod
    def from_linear(cls, source: nn.Linear, grid: QuantizedWeight) -> "GridLinear":
        """Make a layer around the parameters of another one."""
        with torch.device("meta"):
            made = cls(source.in_features, source.out_features, source.bias is not None)
        made.weight, made.bias, made.grid = source.weight, source.bias, grid
        return made.eval()


def take_only(matrices: Sequence[Tensor]) -> Tensor:
    """Join a single matrix, without a copy."""
    (matrix,) = matrices
    return matrix


def install_grids(model: Any, grids: Mapping[str, QuantizedWeight], weights: Mapping[str, Tensor]) -> int:
    """Replace linear layers of a model by those with a grid.

    Args:
        model: transformers model.
        grids: grids by the path of the module in the checkpoint. Those without a linear layer are left out.
        weights: weights of the checkpoint, which the model shares. transformers renames the paths of some models, so a
            layer is found by the address of its weight.

    Returns:
        Number of layers that were replaced.
    """
    replaced, found = 0, {weights[f"{path}.weight"].data_ptr(): grid for path, grid in grids.items()}
    for path, module in list(model.named_modules()):
        grid = found.get(module.weight.data_ptr()) if type(module) is nn.Linear else None
        if grid is not None and grid.codes.shape == module.weight.shape:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, GridLinear.from_linear(module, grid))
            replaced += 1
    return replaced


def pack_joined(
    modules: Sequence[nn.Linear], join: JoinRows, pack: PackWeight, bias: Tensor | None, arena: Arena, is_owned: bool
) -> PackedWeight:
    """Pack linear layers as one matrix: by their grids if all have one of a kind, else by `pack`.

    Args:
        modules: linear layers.
        join: joins their rows.
        pack: packs a matrix.
        bias: joined bias, or None.
        arena: memory of packed weights.
        is_owned: whether to free grids that were packed.
    """
    grids = [module.grid for module in modules if isinstance(module, GridLinear) and module.grid is not None]
    if len(grids) < len(modules) or len({(grid.kind, grid.group) for grid in grids}) > 1:
        return pack(join([module.weight.detach() for module in modules]), bias, arena)
    codes = join([grid.codes for grid in grids])
    is_grouped = grids[0].kind == INT4
    scale = join([grid.scale if is_grouped else grid.scale[:, None] for grid in grids])
    joined = QuantizedWeight(codes, scale if is_grouped else scale[:, 0].contiguous(), grids[0].kind, grids[0].group)
    for module in modules:
        if is_owned and isinstance(module, GridLinear):
            module.grid = None
    return pack_codes(joined, bias, arena)
