"""Reader of EAGLE-1 and EAGLE-2 heads as their authors publish them.

The two methods differ only in the draft tree, not in the checkpoint.
"""

from typing import Any

from foredraft.checkpoints.decoder_layers import count_layers, infer_block_shape, list_layer_shapes
from foredraft.checkpoints.schema import Checkpoint, EagleShape, TargetInfo
from foredraft.checkpoints.tensor_claims import TensorClaims
from foredraft.checkpoints.tensors import TensorFiles

METHOD, TITLE = "eagle", "an EAGLE head"


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
    return Checkpoint(METHOD, "EAGLE", files.folder, shape, claims.read(), config)


def check_vocabulary(claims: TensorClaims, config: dict[str, Any], target: TargetInfo) -> None:
    """Check that a head has the vocabulary of the target, by its own embedding or else by config.json."""
    if "embed_tokens.weight" in claims:
        rows = claims.require_shape("embed_tokens.weight", 2)[0]
    else:
        rows = config.get("vocab_size", target.vocab_size)
    claims.check_target("vocabulary size", rows, target.name, target.vocab_size)


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
