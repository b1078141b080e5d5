"""T5 and its like as a Stack: mT5, UMT5, Flan-T5. Positions are a bias by distance; norms have no mean; no biases."""

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

FAMILIES = ("t5", "mt5", "umt5")


def build_decoder(model: Any, merge_linears: MergeLinears) -> DecoderStack:
    """The decoder of a T5ForConditionalGeneration or of its like."""
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
    """T5 1.0, whose logits' matrix is its embeddings, makes the states smaller; T5 1.1 and mT5 do not."""
    if config.model_type == "mt5":
        return False
    named = getattr(config, "scale_decoder_outputs", None)
    return bool(config.tie_word_embeddings if named is None else named)


def _build_block(module: Any, merge_linears: MergeLinears) -> DecoderBlock:
    own, cross, feed = module.layer[0], module.layer[1], module.layer[2]
    a, c, d = own.SelfAttention, cross.EncDecAttention, feed.DenseReluDense
    return DecoderBlock(
        self_norm=Seq2SeqNorm.from_module(own.layer_norm),
        qkv=merge_linears([a.q, a.k, a.v]),
        self_out=merge_linears([a.o]),
        cross_norm=Seq2SeqNorm.from_module(cross.layer_norm),
        cross_query=merge_linears([c.q]),
        cross_kv=merge_linears([c.k, c.v]),
        cross_out=merge_linears([c.o]),
        mlp_norm=Seq2SeqNorm.from_module(feed.layer_norm),
        mlp_in=merge_linears([d.wi_0, d.wi_1]) if hasattr(d, "wi_0") else merge_linears([d.wi]),
        mlp_out=merge_linears([d.wo]),
    )


def build_position_biases(attentions: Sequence[Any]) -> tuple[Tensor, ...]:
    """[far + 1, H] for each attention that has a table of its own: what is added for a key so many tokens back. From
    `far` on it is the same."""
    found = []
    for attention in attentions:
        if not attention.has_relative_attention_bias:
            continue
        table = attention.relative_attention_bias.weight.detach()  # [buckets, H]
        distance = torch.arange(attention.relative_attention_max_distance + 1, device=table.device)
        found.append(table[compute_buckets(attention, -distance)])
    return tuple(found)


def build_encoder(model: Any) -> EncoderWeights:
    """The encoder's layers."""
    module = model.get_encoder()
    first = module.block[0].layer[0].SelfAttention
    words = module.embed_tokens
    attentions = [block.layer[0].SelfAttention for block in module.block]
    found = [_build_bidirectional_bias(attention) for attention in attentions if attention.has_relative_attention_bias]

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        return words(tokens)  # type: ignore[no-any-return]

    return EncoderWeights(
        heads=first.n_heads,
        head_dim=first.key_value_proj_dim,
        embed=embed,
        blocks=tuple(_build_encoder_block(block) for block in module.block),
        norm=Seq2SeqNorm.from_module(module.final_layer_norm),
        position_biases=tuple(found if len(found) > 1 else found * len(attentions)),
    )


def _build_encoder_block(module: Any) -> EncoderBlock:
    own, feed = module.layer[0], module.layer[1]
    a, d = own.SelfAttention, feed.DenseReluDense
    return EncoderBlock(
        self_norm=Seq2SeqNorm.from_module(own.layer_norm),
        qkv=MergedLinear([a.q, a.k, a.v], False),
        self_out=MergedLinear([a.o], False),
        mlp_norm=Seq2SeqNorm.from_module(feed.layer_norm),
        mlp_in=MergedLinear([d.wi_0, d.wi_1] if hasattr(d, "wi_0") else [d.wi], False),
        mlp_out=MergedLinear([d.wo], False),
    )


def _build_bidirectional_bias(attention: Any) -> Tensor:
    table, far = attention.relative_attention_bias.weight.detach(), attention.relative_attention_max_distance
    relative = torch.arange(-far, far + 1, device=table.device)
    found: Tensor = table[compute_buckets(attention, relative, is_decoder=False)]
    return found


def compute_buckets(attention: Any, relative: Tensor, is_decoder: bool = True) -> Tensor:
    """Compute the bias bucket of key position minus query position, as the module does."""
    count, far = attention.relative_attention_num_buckets, attention.relative_attention_max_distance
    make = attention._relative_position_bucket
    if isinstance(type(attention).__dict__.get("_relative_position_bucket"), staticmethod):
        return make(relative, bidirectional=not is_decoder, num_buckets=count, max_distance=far)  # type: ignore[no-any-return]
    return make(relative)  # type: ignore[no-any-return]
