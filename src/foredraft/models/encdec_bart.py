"""BART and its like as a Stack: mBART, PLBart, Pegasus, Marian, Blenderbot, M2M-100 and NLLB, Whisper. Positions are
embedded; what differs is where norms stand, how embeddings are scaled, and where positions begin."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from foredraft.models.encdec_decoder import (
    Block,
    EncoderBlock,
    EncoderParts,
    Head,
    Join,
    Norm,
    Product,
    Shape,
    Stack,
    activation_of,
)

NORMS_AFTER = ("bart", "plbart", "marian", "blenderbot-small")
NORMS_BEFORE = ("mbart", "pegasus", "blenderbot", "m2m_100", "whisper")
FAMILIES = (*NORMS_AFTER, *NORMS_BEFORE)
UNSCALED = ("whisper",)  # its decoder has a scale and does not use it
NORMED_FIRST = ("blenderbot-small",)  # embeddings are normalised before positions are added

Embed = Callable[[Tensor, Tensor], Tensor]


def stack(model: Any, join: Join) -> Stack:
    """The decoder of a BartForConditionalGeneration or of its like."""
    config, decoder = model.config, model.get_decoder()
    first = decoder.layers[0]
    attention = first.self_attn
    shape = Shape(
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=float(attention.scaling),
        is_gated=False,
        norms_after=config.model_type in NORMS_AFTER,
        activation=activation_of(config.activation_function, first.activation_fn),
        activation_name=config.activation_function,
    )
    blocks = tuple(_block(layer, join) for layer in decoder.layers)
    last = getattr(decoder, "layer_norm", None)
    bias = getattr(model, "final_logits_bias", None)
    head = Head(join([model.get_output_embeddings()]), bias=None if bias is None or not bias.any() else bias[0])
    return Stack(shape, _embed(decoder, config.model_type), blocks, None if last is None else Norm.of(last), head)


def encoder(model: Any) -> EncoderParts:
    """The encoder's layers."""
    module = model.get_encoder()
    attention, last = module.layers[0].self_attn, getattr(module, "layer_norm", None)
    return EncoderParts(
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        embed=_embed(module, "any"),
        blocks=tuple(_encoder_block(layer) for layer in module.layers),
        norm=None if last is None else Norm.of(last),
    )


def _encoder_block(layer: Any) -> EncoderBlock:
    a = layer.self_attn
    return EncoderBlock(
        own_norm=Norm.of(layer.self_attn_layer_norm),
        qkv=Product([a.q_proj, a.k_proj, a.v_proj], False),
        out=Product([a.out_proj], False),
        inner_norm=Norm.of(layer.final_layer_norm),
        wide=Product([layer.fc1], False),
        narrow=Product([layer.fc2], False),
    )


def _embed(decoder: Any, family: str) -> Embed:
    words = decoder.embed_tokens
    own = float(getattr(words, "embed_scale", 1.0))  # the module's own, which it applies itself
    scale = 1.0 if own != 1.0 or family in UNSCALED else float(getattr(decoder, "embed_scale", 1.0))
    norm = Norm.of(decoder.layernorm_embedding) if hasattr(decoder, "layernorm_embedding") else None
    table, first = _positions(decoder.embed_positions)
    is_first = family in NORMED_FIRST

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        x = words(tokens)
        x = x if scale == 1.0 else x * scale
        if norm is not None and is_first:
            x = norm(x)
        x = x + table.index_select(0, positions + first if first else positions)
        return norm(x) if norm is not None and not is_first else x

    return embed


def _positions(module: Any) -> tuple[Tensor, int]:
    """The rows of the positions, and which one the first position has."""
    if isinstance(module, nn.Embedding):
        return module.weight.detach(), int(getattr(module, "offset", 0))
    return module.weights.detach(), int(module.padding_idx) + 1  # M2M-100 counts from its padding


def _block(layer: Any, join: Join) -> Block:
    a, c = layer.self_attn, layer.encoder_attn
    return Block(
        own_norm=Norm.of(layer.self_attn_layer_norm),
        qkv=join([a.q_proj, a.k_proj, a.v_proj]),
        own_out=join([a.out_proj]),
        cross_norm=Norm.of(layer.encoder_attn_layer_norm),
        query=join([c.q_proj]),
        cross_kv=join([c.k_proj, c.v_proj]),
        cross_out=join([c.out_proj]),
        inner_norm=Norm.of(layer.final_layer_norm),
        wide=join([layer.fc1]),
        narrow=join([layer.fc2]),
    )


def num_positions(model: Any) -> int:
    """Tokens a text of the decoder may have."""
    table, first = _positions(model.get_decoder().embed_positions)
    return len(table) - first


def source_positions(model: Any) -> int:
    """Tokens a source may have; of sound, frames after the convolutions."""
    module = model.get_encoder().embed_positions
    table, first = _positions(module)
    return len(table) - first
