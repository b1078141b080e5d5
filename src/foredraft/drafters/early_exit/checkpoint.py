"""Reader of early-exit adapters, in a layout of this project: no other program has one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles

NAME = "early_exit"
TENSOR_PREFIX = "exit_adapter."


@dataclass(frozen=True)
class EarlyExitShape:
    """Shape of an adapter after the first layers of the target.

    Tensors: `norm.weight` [H], `gate_proj.weight` and `up_proj.weight` [rank, H], `down_proj.weight` [H, rank].
    """

    hidden: int
    rank: int
    exit_layer: int  # the adapter reads the residual stream after this many layers of the target


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read an early-exit adapter: rank from the tensors, exit layer from config.json."""
    claims = TensorClaims(files, {name.removeprefix(TENSOR_PREFIX): name for name in files.stored_tensors})
    rank, hidden = claims.require_shape("gate_proj.weight", 2)
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    layer = config.get("exit_layer")
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise claims.refuse(
            f"config.json must set exit_layer, the layer after which the target is left, and has {layer!r}"
        )
    num_layers = config.get("target_num_layers", target.num_layers)
    claims.check_target("number of layers", num_layers, target.name, target.num_layers)
    if not 1 <= layer < target.num_layers:
        raise claims.refuse(
            f"exit_layer is {layer}, and {target.name} can be left after 1..{target.num_layers - 1} layers"
        )
    shape = EarlyExitShape(hidden, rank, layer)
    claims.check(list_tensor_shapes(shape))
    return Checkpoint(NAME, "early exit", files.folder, shape, claims.read(), config)


def list_tensor_shapes(shape: EarlyExitShape) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of a shape by internal name."""
    return {
        "norm.weight": (shape.hidden,),
        "gate_proj.weight": (shape.rank, shape.hidden),
        "up_proj.weight": (shape.rank, shape.hidden),
        "down_proj.weight": (shape.hidden, shape.rank),
    }


def make_layout(shape: EarlyExitShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the names of this project; no other layout exists."""
    config = {
        "architectures": ["EarlyExitAdapter"],
        "model_type": "early_exit",
        "hidden_size": shape.hidden,
        "rank": shape.rank,
        "exit_layer": shape.exit_layer,
    }
    return CheckpointLayout(NAME, check_tensors(tensors, list_tensor_shapes(shape), TENSOR_PREFIX), config)
