"""Conversion of T5-like models to a DecoderStack: T5, Flan-T5, mT5, UMT5.

Positions are a bias by distance. Norms are RMS norms, and linear layers have no bias.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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

FAMILIES = ("t5", "mt5", "umt5")  # by config.model_type


def build_decoder(model: Any, merge_linears: MergeLinears) -> DecoderStack:
    """Build the decoder of a T5-like model.

    Args:
        model: transformers model, such as T5ForConditionalGeneration.
        merge_linears: joins linear modules with the same input.
    """
    config, decoder = model.config, model.decoder
    attention = decoder.block[0].layer[0].SelfAttention
    feed = decoder.block[0].layer[-1].DenseReluDense
    shape = DecoderShape(
        heads=attention.n_heads,
        head_dim=attention.key_value_proj_dim,
        scale=float(getattr(attention, "scaling", 1.0)),
        is_gated=bool(config.is_gated_act),
        is_post_norm=False,
        activation=find_activation(config.dense_act_fn, feed.act),
        activation_name=config.dense_act_fn,
    )
    embedding = decoder.embed_tokens

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        return embedding(tokens)  # type: ignore[no-any-return]

    blocks = tuple(_build_block(block, merge_linears) for block in decoder.block)
    scale = config.d_model**-0.5 if _has_scaled_states(config) else 1.0
    head = LMHead(merge_linears([model.lm_head]), scale)
    biases = build_position_biases([block.layer[0].SelfAttention for block in decoder.block])
    return DecoderStack(shape, embed, blocks, Seq2SeqNorm.from_module(decoder.final_layer_norm), head, biases)


def _has_scaled_states(config: Any) -> bool:
    """Whether the states are scaled before the head: in T5 1.0, which ties head and embeddings; not in T5 1.1, mT5."""
    if config.model_type == "mt5":
        return False
    setting = getattr(config, "scale_decoder_outputs", None)
    return bool(config.tie_word_embeddings if setting is None else setting)


def _build_block(module: Any, merge_linears: MergeLinears) -> DecoderBlock:
    self_attention, cross_attention, mlp = module.layer[0], module.layer[1], module.layer[2]
    a, c, d = self_attention.SelfAttention, cross_attention.EncDecAttention, mlp.DenseReluDense
    return DecoderBlock(
        self_norm=Seq2SeqNorm.from_module(self_attention.layer_norm),
        qkv=merge_linears([a.q, a.k, a.v]),
        self_out=merge_linears([a.o]),
        cross_norm=Seq2SeqNorm.from_module(cross_attention.layer_norm),
        cross_query=merge_linears([c.q]),
        cross_kv=merge_linears([c.k, c.v]),
        cross_out=merge_linears([c.o]),
        mlp_norm=Seq2SeqNorm.from_module(mlp.layer_norm),
        mlp_in=merge_linears([d.wi_0, d.wi_1]) if hasattr(d, "wi_0") else merge_linears([d.wi]),
        mlp_out=merge_linears([d.wo]),
    )


def build_position_biases(attentions: Sequence[Any]) -> tuple[Tensor, ...]:
    """Build the self-attention biases of a decoder.

    Args:
        attentions: attention modules by layer.

    Returns:
        [far + 1, H] for every attention with a bias table: the bias of a key by its distance in tokens. Larger
        distances have the bias of `far`.
    """
    biases = []
    for attention in attentions:
        if not attention.has_relative_attention_bias:
            continue
        table = attention.relative_attention_bias.weight.detach()  # [buckets, H]
        distance = torch.arange(attention.relative_attention_max_distance + 1, device=table.device)
        biases.append(table[compute_buckets(attention, -distance)])
    return tuple(biases)


def build_encoder(model: Any) -> EncoderWeights:
    """Build the encoder of a T5-like model."""
    module = model.get_encoder()
    first = module.block[0].layer[0].SelfAttention
    words = module.embed_tokens
    attentions = [block.layer[0].SelfAttention for block in module.block]
    biases = [_build_bidirectional_bias(attention) for attention in attentions if attention.has_relative_attention_bias]

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        return words(tokens)  # type: ignore[no-any-return]

    return EncoderWeights(
        heads=first.n_heads,
        head_dim=first.key_value_proj_dim,
        embed=embed,
        blocks=tuple(_build_encoder_block(block) for block in module.block),
        norm=Seq2SeqNorm.from_module(module.final_layer_norm),
        position_biases=tuple(biases if len(biases) > 1 else biases * len(attentions)),
    )


def _build_encoder_block(module: Any) -> EncoderBlock:
    self_attention, mlp = module.layer[0], module.layer[1]
    a, d = self_attention.SelfAttention, mlp.DenseReluDense
    return EncoderBlock(
        self_norm=Seq2SeqNorm.from_module(self_attention.layer_norm),
        qkv=MergedLinear([a.q, a.k, a.v], False),
        self_out=MergedLinear([a.o], False),
        mlp_norm=Seq2SeqNorm.from_module(mlp.layer_norm),
        mlp_in=MergedLinear([d.wi_0, d.wi_1] if hasattr(d, "wi_0") else [d.wi], False),
        mlp_out=MergedLinear([d.wo], False),
    )


def _build_bidirectional_bias(attention: Any) -> Tensor:
    """Build the bias [2 far + 1, H] by key position minus query position, from -far to far."""
    table, far = attention.relative_attention_bias.weight.detach(), attention.relative_attention_max_distance
    relative = torch.arange(-far, far + 1, device=table.device)
    bias: Tensor = table[compute_buckets(attention, relative, is_decoder=False)]
    return bias


def compute_buckets(attention: Any, relative: Tensor, is_decoder: bool = True) -> Tensor:
    """Compute the row of the bias table by relative position, with the module's own function.

    Args:
        attention: attention module of transformers.
        relative: key positions minus query positions.
        is_decoder: whether attention is causal. Default True.
    """
    count, far = attention.relative_attention_num_buckets, attention.relative_attention_max_distance
    find = attention._relative_position_bucket
    if isinstance(type(attention).__dict__.get("_relative_position_bucket"), staticmethod):
        return find(relative, bidirectional=not is_decoder, num_buckets=count, max_distance=far)  # type: ignore[no-any-return]
    return find(relative)  # type: ignore[no-any-return]
