"""Reader of Chimera heads in the layout that `foredraft train chimera` writes.

The files that the authors publish are pickles that also hold a whole model; they are not read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foredraft.checkpoints.decoder_layers import infer_block_shape, list_layer_shapes, make_layer_config
from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.models.draft_layer import DraftLayerShape
from foredraft.models.forward_batch import AFTER_FINAL_NORM

NAME = "chimera"
HIDDEN_LAYERS_KEY = "target_layer_taps"
HEAD_WEIGHT = re.compile(r"^heads\.(\d+)\.weight$")
NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class ChimeraShape:
    """Shape of Chimera heads.

    Tensors: `fc.weight` [H, len(hidden_layers) * H] if there are several hidden layers, `trigram.weight` [H, 3H]
    (oldest token first), `join.weight` [H, 2H] (embedding first), `layers.0.*`, `heads.{k}.weight` [H, 2H] (context
    encoder first) and `.bias` [H], `norm.weight` [H].
    """

    block: DraftLayerShape
    vocab_size: int
    hidden_layers: tuple[int, ...]  # boundaries of the target; AFTER_FINAL_NORM = the last state, normalised
    num_heads: int = 4

    @property
    def has_fc(self) -> bool:
        return len(self.hidden_layers) > 1

    @property
    def num_layers(self) -> int:
        """Number of layers of the context encoder."""
        return 1


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read Chimera heads: sizes from the tensors, hidden layers and rope from config.json."""
    claims = TensorClaims(files, {name: name for name in files.stored_tensors})
    shape = _infer_shape(claims, config, target)
    claims.check(list_tensor_shapes(shape))
    return Checkpoint(NAME, "Chimera", files.folder, shape, claims.read(), config)


def _infer_shape(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> ChimeraShape:
    hidden = claims.require_shape("norm.weight", 1)[0]
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    claims.check_target("vocabulary size", config.get("vocab_size", target.vocab_size), target.name, target.vocab_size)
    head_indices = [int(match[1]) for name in claims.stored_names if (match := HEAD_WEIGHT.match(name))]
    num_heads = 1 + max(head_indices, default=0)
    if num_heads > len(claims.stored_names):  # a smaller gap is reported by TensorClaims.check
        raise claims.refuse_missing("heads.0.weight")
    hidden_layers = _read_hidden_layers(claims, config, target)
    return ChimeraShape(infer_block_shape(claims, config, hidden), target.vocab_size, hidden_layers, num_heads)


def _read_hidden_layers(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> tuple[int, ...]:
    boundaries, num_layers = config.get(HIDDEN_LAYERS_KEY), target.num_layers
    is_list = isinstance(boundaries, list) and all(
        isinstance(boundary, int) and not isinstance(boundary, bool) for boundary in boundaries
    )
    if not is_list or not boundaries or len(set(boundaries)) != len(boundaries):
        raise claims.refuse(
            f"config.json must set {HIDDEN_LAYERS_KEY} to distinct boundaries of the target, and has {boundaries!r}"
        )
    if any(boundary != AFTER_FINAL_NORM and not 0 <= boundary <= num_layers for boundary in boundaries):
        raise claims.refuse(
            f"it reads the boundaries {boundaries} of its target, and {target.name} has {num_layers} layers; "
            "use a drafter for this target"
        )
    return tuple(boundaries)


def list_tensor_shapes(shape: ChimeraShape) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of a shape by internal name."""
    hidden = shape.block.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "trigram.weight": (hidden, 3 * hidden),
        "join.weight": (hidden, 2 * hidden),
        "norm.weight": (hidden,),
    }
    if shape.has_fc:
        shapes["fc.weight"] = (hidden, len(shape.hidden_layers) * hidden)
    for i in range(shape.num_heads):
        shapes |= {f"heads.{i}.weight": (hidden, 2 * hidden), f"heads.{i}.bias": (hidden,)}
    return shapes | list_layer_shapes(shape.block, 0, hidden, NORMS)


def make_layout(shape: ChimeraShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the names of this project; the authors publish pickles of whole models."""
    config = make_layer_config(shape.block, 1) | {
        "architectures": ["ChimeraModel"],
        "model_type": "chimera",
        "vocab_size": shape.vocab_size,
        "chimera_num_heads": shape.num_heads,
        HIDDEN_LAYERS_KEY: list(shape.hidden_layers),
    }
    return CheckpointLayout(NAME, check_tensors(tensors, list_tensor_shapes(shape)), config)
