"""BART and its like as a Stack: mBART, PLBart, Pegasus, Marian, Blenderbot, M2M-100 and NLLB, Whisper. Positions are
embedded; what differs is where norms stand, how embeddings are scaled, and where positions begin."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from foredraft.models.encdec.decoder import (
    DecoderBlock,
    DecoderShape,
    DecoderStack,
    EncoderBlock,
    EncoderWeights,
    LMHead,
    MergedLinear,
    MergeLinears,
    Seq2SeqNorm,
    find_activation,
)

POST_NORM_FAMILIES = ("bart", "plbart", "marian", "blenderbot-small")
PRE_NORM_FAMILIES = ("mbart", "pegasus", "blenderbot", "m2m_100", "whisper")
FAMILIES = (*POST_NORM_FAMILIES, *PRE_NORM_FAMILIES)
UNSCALED_FAMILIES = ("whisper",)  # its decoder has a scale and does not use it
NORM_BEFORE_POSITIONS_FAMILIES = ("blenderbot-small",)  # embeddings are normalised before positions are added

EmbedTokens = Callable[[Tensor, Tensor], Tensor]


def build_decoder(model: Any, merge_linears: MergeLinears) -> DecoderStack:
    """The decoder of a BartForConditionalGeneration or of its like."""
    config, decoder = model.config, model.get_decoder()
    first = decoder.layers[0]
    attention = first.self_attn
    shape = DecoderShape(
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        scale=float(attention.scaling),
        is_gated=False,
        is_post_norm=config.model_type in POST_NORM_FAMILIES,
        activation=find_activation(config.activation_function, first.activation_fn),
        activation_name=config.activation_function,
    )
    blocks = tuple(_build_block(layer, merge_linears) for layer in decoder.layers)
    last = getattr(decoder, "layer_norm", None)
    bias = getattr(model, "final_logits_bias", None)
    head = LMHead(
        merge_linears([model.get_output_embeddings()]), bias=None if bias is None or not bias.any() else bias[0]
    )
    return DecoderStack(
        shape,
        _build_embed(decoder, config.model_type),
        blocks,
        None if last is None else Seq2SeqNorm.from_module(last),
        head,
    )


def build_encoder(model: Any) -> EncoderWeights:
    """The encoder's layers."""
    module = model.get_encoder()
    attention, last = module.layers[0].self_attn, getattr(module, "layer_norm", None)
    return EncoderWeights(
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        embed=_build_embed(module, "any"),
        blocks=tuple(_build_encoder_block(layer) for layer in module.layers),
        norm=None if last is None else Seq2SeqNorm.from_module(last),
    )


def _build_encoder_block(layer: Any) -> EncoderBlock:
    a = layer.self_attn
    return EncoderBlock(
        self_norm=Seq2SeqNorm.from_module(layer.self_attn_layer_norm),
        qkv=MergedLinear([a.q_proj, a.k_proj, a.v_proj], False),
        self_out=MergedLinear([a.out_proj], False),
        mlp_norm=Seq2SeqNorm.from_module(layer.final_layer_norm),
        mlp_in=MergedLinear([layer.fc1], False),
        mlp_out=MergedLinear([layer.fc2], False),
    )


def _build_embed(decoder: Any, family: str) -> EmbedTokens:
    words = decoder.embed_tokens
    own = float(getattr(words, "embed_scale", 1.0))  # the module's own, which it applies itself
    scale = 1.0 if own != 1.0 or family in UNSCALED_FAMILIES else float(getattr(decoder, "embed_scale", 1.0))
    norm = Seq2SeqNorm.from_module(decoder.layernorm_embedding) if hasattr(decoder, "layernorm_embedding") else None
    table, first = _find_position_table(decoder.embed_positions)
    is_first = family in NORM_BEFORE_POSITIONS_FAMILIES

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        x = words(tokens)
        x = x if scale == 1.0 else x * scale
        if norm is not None and is_first:
            x = norm(x)
        x = x + table.index_select(0, positions + first if first else positions)
        return norm(x) if norm is not None and not is_first else x

    return embed


def _find_position_table(module: Any) -> tuple[Tensor, int]:
    """The rows of the positions, and which one the first position has."""
    if isinstance(module, nn.Embedding):
        return module.weight.detach(), int(getattr(module, "offset", 0))
    return module.weights.detach(), int(module.padding_idx) + 1  # M2M-100 counts from its padding


def _build_block(layer: Any, merge_linears: MergeLinears) -> DecoderBlock:
    a, c = layer.self_attn, layer.encoder_attn
    return DecoderBlock(
        self_norm=Seq2SeqNorm.from_module(layer.self_attn_layer_norm),
        qkv=merge_linears([a.q_proj, a.k_proj, a.v_proj]),
        self_out=merge_linears([a.out_proj]),
        cross_norm=Seq2SeqNorm.from_module(layer.encoder_attn_layer_norm),
        cross_query=merge_linears([c.q_proj]),
        cross_kv=merge_linears([c.k_proj, c.v_proj]),
        cross_out=merge_linears([c.out_proj]),
        mlp_norm=Seq2SeqNorm.from_module(layer.final_layer_norm),
        mlp_in=merge_linears([layer.fc1]),
        mlp_out=merge_linears([layer.fc2]),
    )


def num_positions(model: Any) -> int:
    """Tokens a text of the decoder may have."""
    table, first = _find_position_table(model.get_decoder().embed_positions)
    return len(table) - first


def num_source_positions(model: Any) -> int:
    """Tokens a source may have; of sound, frames after the convolutions."""
    module = model.get_encoder().embed_positions
    table, first = _find_position_table(module)
    return len(table) - first
