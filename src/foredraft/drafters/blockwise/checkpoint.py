"""Reader of blockwise parallel decoding heads, in a layout of this project: no checkpoint of this kind is published.

A folder holds `model.safetensors` with the four tensors of BlockwiseShape, each name prefixed with `blockwise.`, and
`config.json` with `model_type: "blockwise"`, `blockwise_num_heads`, and the target's `hidden_size` and `vocab_size`.
There is no output matrix: the target's lm_head serves all heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles

NAME = "blockwise"
TENSOR_PREFIX = "blockwise."
TENSOR_NAME = r"blockwise\.(hidden|output)\.(weight|bias)$"


@dataclass(frozen=True)
class BlockwiseShape:
    """Shape of blockwise parallel decoding heads.

    Tensors: `hidden.weight` [inner, H], `hidden.bias` [inner], `output.weight` [num_heads * H, inner], `output.bias`
    [num_heads * H]. Head h has the rows from h * H to (h + 1) * H.
    """

    hidden: int
    vocab_size: int
    num_heads: int  # without the target's own lm_head
    inner: int  # width of all heads together


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read blockwise heads. All sizes follow from the tensors; config.json must not contradict them."""
    claims = TensorClaims(files, {name.removeprefix(TENSOR_PREFIX): name for name in files.stored_tensors})
    shape = _infer_shape(claims, config, target)
    claims.check(list_tensor_shapes(shape))
    return Checkpoint(NAME, "blockwise", files.folder, shape, claims.read(), config)


def _infer_shape(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> BlockwiseShape:
    inner, hidden = claims.require_shape("hidden.weight", 2)
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    claims.check_target("vocabulary size", config.get("vocab_size", target.vocab_size), target.name, target.vocab_size)
    rows = claims.require_shape("output.weight", 2)[0]
    if rows == 0 or rows % hidden:
        raise claims.refuse(f"{TENSOR_PREFIX}output.weight has {rows} rows and has to have {hidden} for every head")
    declared = config.get("blockwise_num_heads", rows // hidden)
    if declared != rows // hidden:
        raise claims.refuse(f"config.json sets blockwise_num_heads {declared!r}, and the weights hold {rows // hidden}")
    return BlockwiseShape(hidden, target.vocab_size, num_heads=rows // hidden, inner=inner)


def list_tensor_shapes(shape: BlockwiseShape) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of a shape by internal name."""
    return {
        "hidden.weight": (shape.inner, shape.hidden),
        "hidden.bias": (shape.inner,),
        "output.weight": (shape.num_heads * shape.hidden, shape.inner),
        "output.bias": (shape.num_heads * shape.hidden,),
    }


def make_layout(shape: BlockwiseShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the names of this project; no other layout exists."""
    config = {
        "architectures": ["BlockwiseHeads"],
        "model_type": "blockwise",
        "blockwise_num_heads": shape.num_heads,
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocab_size,
    }
    return CheckpointLayout(NAME, check_tensors(tensors, list_tensor_shapes(shape), TENSOR_PREFIX), config)
