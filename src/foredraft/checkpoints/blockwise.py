"""Heads of blockwise parallel decoding. Nobody has published any, so the layout is ours.

A folder holds `model.safetensors` with the four tensors of BlockwiseShape, each name after `blockwise.`, and
`config.json` with `model_type: "blockwise"`, `blockwise_num_heads`, `hidden_size` and `vocab_size` of the target. There
is no output matrix: the target's own serves all heads.
"""

import re
from typing import Any

from foredraft.checkpoints.base import BlockwiseShape, Checkpoint, TargetFacts
from foredraft.checkpoints.claims import Claims
from foredraft.checkpoints.tensors import TensorFiles

METHOD, TITLE = "blockwise", "blockwise heads"
PREFIX = "blockwise."
NAME = re.compile(r"^blockwise\.(hidden|output)\.(weight|bias)$")


def is_mine(name: str) -> bool:
    """Whether a stored name says blockwise."""
    return NAME.match(name) is not None


def read(files: TensorFiles, config: dict[str, Any], target: TargetFacts) -> Checkpoint:
    """The tensors tell every size; config.json must not contradict them."""
    claims = Claims(files, {name.removeprefix(PREFIX): name for name in files.stored})
    shape = _shape(claims, config, target)
    claims.check(expected(shape))
    return Checkpoint(METHOD, "blockwise", files.folder, shape, claims.read(), config)


def _shape(claims: Claims, config: dict[str, Any], target: TargetFacts) -> BlockwiseShape:
    inner, hidden = claims.shape("hidden.weight", 2)
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    claims.check_target("vocabulary size", config.get("vocab_size", target.vocab_size), target.name, target.vocab_size)
    rows = claims.shape("output.weight", 2)[0]
    if rows == 0 or rows % hidden:
        raise claims.refuse(f"{PREFIX}output.weight has {rows} rows and has to have {hidden} for every head")
    said = config.get("blockwise_num_heads", rows // hidden)
    if said != rows // hidden:
        raise claims.refuse(f"config.json says blockwise_num_heads {said!r}, and the weights hold {rows // hidden}")
    return BlockwiseShape(hidden, target.vocab_size, num_heads=rows // hidden, inner=inner)


def expected(shape: BlockwiseShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a shape."""
    return {
        "hidden.weight": (shape.inner, shape.hidden),
        "hidden.bias": (shape.inner,),
        "output.weight": (shape.num_heads * shape.hidden, shape.inner),
        "output.bias": (shape.num_heads * shape.hidden,),
    }
