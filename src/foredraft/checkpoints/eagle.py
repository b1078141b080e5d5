"""EAGLE-1 and EAGLE-2 heads as their authors publish them; the two differ only in the tree that is drafted."""

from typing import Any

from foredraft.checkpoints.base import Checkpoint, EagleShape, TargetFacts
from foredraft.checkpoints.claims import Claims
from foredraft.checkpoints.layers import block_shape, count_layers, layer_tensors
from foredraft.checkpoints.tensors import TensorFiles

METHOD, TITLE = "eagle", "an EAGLE head"


def read(files: TensorFiles, config: dict[str, Any], target: TargetFacts) -> Checkpoint:
    """Biases are where the tensors have them, whatever config.json says."""
    claims = Claims(files, {name: name for name in files.stored if not name.endswith(".rotary_emb.inv_freq")})
    if "lm_head.weight" in claims:
        raise claims.refuse("lm_head.weight has no place in an EAGLE head, which reads the target's; remove it")
    hidden, width = claims.shape("fc.weight", 2)
    claims.check_target("hidden size", hidden, target.name, target.hidden)
    if width != 2 * hidden:
        raise claims.refuse(f"fc.weight is {[hidden, width]} and has to be {[hidden, 2 * hidden]}: embedding and state")
    check_vocabulary(claims, config, target)
    shape = EagleShape(
        block=block_shape(claims, config, hidden),
        vocab_size=target.vocab_size,
        num_layers=count_layers(claims),
        has_fc_bias="fc.bias" in claims,
        has_embedding="embed_tokens.weight" in claims,
    )
    claims.check(expected(shape))
    return Checkpoint(METHOD, "EAGLE", files.folder, shape, claims.read(), config)


def check_vocabulary(claims: Claims, config: dict[str, Any], target: TargetFacts) -> None:
    """The target's, by the rows of its own embedding or, without one, by config."""
    if "embed_tokens.weight" in claims:
        rows = claims.shape("embed_tokens.weight", 2)[0]
    else:
        rows = config.get("vocab_size", target.vocab_size)
    claims.check_target("vocabulary size", rows, target.name, target.vocab_size)


def expected(shape: EagleShape) -> dict[str, tuple[int, ...]]:
    """Layer 0 reads what fc made as it is; later ones normalise first."""
    hidden = shape.block.hidden
    found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 2 * hidden)}
    if shape.has_fc_bias:
        found["fc.bias"] = (hidden,)
    if shape.has_embedding:
        found["embed_tokens.weight"] = (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        norms = ("input_layernorm", "post_attention_layernorm")[layer == 0 :]
        found |= layer_tensors(shape.block, layer, hidden, norms)
    return found
