"""Reader of EAGLE-1 and EAGLE-2 heads as their authors publish them.

The two methods differ only in the draft tree, not in the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foredraft.checkpoints.decoder_layers import (
    check_vocabulary,
    count_layers,
    infer_block_shape,
    list_layer_shapes,
    make_layer_config,
)
from foredraft.checkpoints.layouts import CheckpointLayout, check_tensors
from foredraft.checkpoints.schema import Checkpoint, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles
from foredraft.models.draft_layer import DraftLayerShape

NAME = "eagle"


@dataclass(frozen=True)
class EagleShape:
    """Shape of an EAGLE-1/2 head.

    Tensors: `fc.weight` [H, 2H] (embedding first), `fc.bias`, `layers.{i}.*`, `embed_tokens.weight`. Layer 0 has no
    input_layernorm.
    """

    block: DraftLayerShape
    vocab_size: int
    num_layers: int = 1
    has_fc_bias: bool = False
    has_embedding: bool = False  # False: the head uses the target's embedding


def read(files: TensorFiles, config: dict[str, Any], target: TargetInfo) -> Checkpoint:
    """Read an EAGLE head. Biases follow from the tensors, whatever config.json declares."""
    claims = TensorClaims(
        files, {name: name for name in files.stored_tensors if not name.endswith(".rotary_emb.inv_freq")}
    )
    if "lm_head.weight" in claims:
        raise claims.refuse("lm_head.weight has no place in an EAGLE head, which uses the target's; remove it")
    hidden, width = claims.require_shape("fc.weight", 2)
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    if width != 2 * hidden:
        raise claims.refuse(f"fc.weight is {[hidden, width]} and has to be {[hidden, 2 * hidden]}: embedding and state")
    check_vocabulary(claims, config, target)
    shape = EagleShape(
        block=infer_block_shape(claims, config, hidden),
        vocab_size=target.vocab_size,
        num_layers=count_layers(claims),
        has_fc_bias="fc.bias" in claims,
        has_embedding="embed_tokens.weight" in claims,
    )
    claims.check(list_tensor_shapes(shape))
    return Checkpoint(NAME, "EAGLE", files.folder, shape, claims.read(), config)


def list_tensor_shapes(shape: EagleShape) -> dict[str, tuple[int, ...]]:
    """List the expected tensors of a shape by internal name. Layer 0 reads the output of fc without a norm."""
    hidden = shape.block.hidden
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    if shape.has_fc_bias:
        shapes["fc.bias"] = (hidden,)
    if shape.has_embedding:
        shapes["embed_tokens.weight"] = (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        norms = ("input_layernorm", "post_attention_layernorm")[layer == 0 :]
        shapes |= list_layer_shapes(shape.block, layer, hidden, norms)
    return shapes


def make_layout(shape: EagleShape, tensors: Mapping[str, Tensor]) -> CheckpointLayout:
    """Use the authors' layout. Their code reads the key `bias`; engines read the tensors."""
    config = make_layer_config(shape.block, shape.num_layers) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "bias": shape.has_fc_bias,
        "qkv_bias": shape.block.has_qkv_bias,
    }
    return CheckpointLayout(NAME, check_tensors(tensors, list_tensor_shapes(shape)), config)
