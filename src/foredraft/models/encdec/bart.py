"""Conversion of BART-like models to a DecoderStack: mBART, PLBart, Pegasus, Marian, Blenderbot, M2M-100, NLLB, Whisper.

Positions are embedded. The families differ in the order of norms, the scale of embeddings, and the first position.
"""

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

# Families by config.model_type.
POST_NORM_FAMILIES = ("bart", "plbart", "marian", "blenderbot-small")
PRE_NORM_FAMILIES = ("mbart", "pegasus", "blenderbot", "m2m_100", "whisper")
FAMILIES = (*POST_NORM_FAMILIES, *PRE_NORM_FAMILIES)
UNSCALED_FAMILIES = ("whisper",)  # the decoder has a scale and does not use it
NORM_BEFORE_POSITIONS_FAMILIES = ("blenderbot-small",)  # embeddings are normalised before positions are added

EmbedTokens = Callable[[Tensor, Tensor], Tensor]  # (token ids [T], positions [T]) -> [T, H]


def build_decoder(model: Any, merge_linears: MergeLinears) -> DecoderStack:
    """Build the decoder of a BART-like model.

    Args:
        model: transformers model, such as BartForConditionalGeneration.
        merge_linears: joins linear modules with the same input.
    """
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
    final_norm = getattr(decoder, "layer_norm", None)
    bias = getattr(model, "final_logits_bias", None)
    head = LMHead(
        merge_linears([model.get_output_embeddings()]), bias=None if bias is None or not bias.any() else bias[0]
    )
    return DecoderStack(
        shape,
        _build_embed(decoder, config.model_type),
        blocks,
        None if final_norm is None else Seq2SeqNorm.from_module(final_norm),
        head,
    )


def build_encoder(model: Any) -> EncoderWeights:
    """Build the text encoder of a BART-like model."""
    module = model.get_encoder()
    attention, final_norm = module.layers[0].self_attn, getattr(module, "layer_norm", None)
    return EncoderWeights(
        heads=attention.num_heads,
        head_dim=attention.head_dim,
        embed=_build_embed(module, "any"),
        blocks=tuple(_build_encoder_block(layer) for layer in module.layers),
        norm=None if final_norm is None else Seq2SeqNorm.from_module(final_norm),
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
    """Build the function that embeds token ids at their positions."""
    words = decoder.embed_tokens
    module_scale = float(getattr(words, "embed_scale", 1.0))  # the module applies this scale itself
    scale = 1.0 if module_scale != 1.0 or family in UNSCALED_FAMILIES else float(getattr(decoder, "embed_scale", 1.0))
    norm = Seq2SeqNorm.from_module(decoder.layernorm_embedding) if hasattr(decoder, "layernorm_embedding") else None
    table, first = _find_position_table(decoder.embed_positions)
    is_norm_first = family in NORM_BEFORE_POSITIONS_FAMILIES

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        x = words(tokens)
        x = x if scale == 1.0 else x * scale
        if norm is not None and is_norm_first:
            x = norm(x)
        x = x + table.index_select(0, positions + first if first else positions)
        return norm(x) if norm is not None and not is_norm_first else x

    return embed


def _find_position_table(module: Any) -> tuple[Tensor, int]:
    """Return the position embeddings and the row of the first position."""
    if isinstance(module, nn.Embedding):
        return module.weight.detach(), int(getattr(module, "offset", 0))
    return module.weights.detach(), int(module.padding_idx) + 1  # M2M-100: positions start after the padding row


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
    """Return the maximum number of tokens of the decoder's sequence."""
    table, first = _find_position_table(model.get_decoder().embed_positions)
    return len(table) - first


def num_source_positions(model: Any) -> int:
    """Return the maximum number of tokens of a source; for audio, of frames after the convolutions."""
    module = model.get_encoder().embed_positions
    table, first = _find_position_table(module)
    return len(table) - first
