"""Chimera heads as `foredraft train chimera` writes them; their authors' own files are pickles beside a whole model."""

import re
from typing import Any

from foredraft.checkpoints.decoder_layers import infer_block_shape, list_layer_shapes
from foredraft.checkpoints.schema import Checkpoint, ChimeraShape, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.models.forward_batch import AFTER_FINAL_NORM

METHOD, TITLE = "chimera", "Chimera heads"
MARKER_TENSOR = "trigram.weight"
HIDDEN_LAYERS_KEY = "target_layer_taps"
HEAD_WEIGHT = re.compile(r"^heads\.(\d+)\.weight$")
NORMS = ("input_layernorm", "post_attention_layernorm")


def is_marker_tensor(name: str) -> bool:
    return name == MARKER_TENSOR


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    claims = TensorClaims(files, {name: name for name in files.stored_tensors})
    shape = _infer_shape(claims, config, target)
    claims.check(list_tensor_shapes(shape))
    return Checkpoint(METHOD, "Chimera", files.folder, shape, claims.read(), config)


def _infer_shape(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> ChimeraShape:
    hidden = claims.require_shape("norm.weight", 1)[0]
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    claims.check_target("vocabulary size", config.get("vocab_size", target.vocab_size), target.name, target.vocab_size)
    found = [int(match[1]) for name in claims.stored_names if (match := HEAD_WEIGHT.match(name))]
    num_heads = 1 + max(found, default=0)
    if num_heads > len(claims.stored_names):  # a gap between them shows as a missing tensor later
        raise claims.refuse_missing("heads.0.weight")
    taps = _read_hidden_layers(claims, config, target)
    return ChimeraShape(infer_block_shape(claims, config, hidden), target.vocab_size, taps, num_heads)


def _read_hidden_layers(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> tuple[int, ...]:
    given, n = config.get(HIDDEN_LAYERS_KEY), target.num_layers
    is_list = isinstance(given, list) and all(isinstance(tap, int) and not isinstance(tap, bool) for tap in given)
    if not is_list or not given or len(set(given)) != len(given):
        raise claims.refuse(
            f"config.json has to say {HIDDEN_LAYERS_KEY}, different boundaries of the target, and says {given!r}"
        )
    if any(tap != AFTER_FINAL_NORM and not 0 <= tap <= n for tap in given):
        raise claims.refuse(
            f"it reads the boundaries {given} of its target, and {target.name} has {n} layers; use a drafter for this "
            "target"
        )
    return tuple(given)


def list_tensor_shapes(shape: ChimeraShape) -> dict[str, tuple[int, ...]]:
    """The tensors of a shape."""
    hidden = shape.block.hidden
    found: dict[str, tuple[int, ...]] = {
        MARKER_TENSOR: (hidden, 3 * hidden),
        "join.weight": (hidden, 2 * hidden),
        "norm.weight": (hidden,),
    }
    if shape.has_fc:
        found["fc.weight"] = (hidden, len(shape.hidden_layers) * hidden)
    for i in range(shape.num_heads):
        found |= {f"heads.{i}.weight": (hidden, 2 * hidden), f"heads.{i}.bias": (hidden,)}
    return found | list_layer_shapes(shape.block, 0, hidden, NORMS)
