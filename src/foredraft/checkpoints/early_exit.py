"""Reader of early-exit adapters, in a layout of this project: no other program has one."""

from typing import Any

from foredraft.checkpoints.schema import Checkpoint, EarlyExitShape, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles

METHOD, TITLE = "early_exit", "an early-exit adapter"
TENSOR_PREFIX = "exit_adapter."


def is_tensor_name(name: str) -> bool:
    """Check whether a stored name belongs to an early-exit adapter."""
    return name.startswith(TENSOR_PREFIX)


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
    return Checkpoint(METHOD, "early exit", files.folder, shape, claims.read(), config)


def list_tensor_shapes(shape: EarlyExitShape) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of a shape by internal name."""
    return {
        "norm.weight": (shape.hidden,),
        "gate_proj.weight": (shape.rank, shape.hidden),
        "up_proj.weight": (shape.rank, shape.hidden),
        "down_proj.weight": (shape.hidden, shape.rank),
    }
