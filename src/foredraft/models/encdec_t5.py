"""T5 and its like as a Stack: mT5, UMT5, Flan-T5. Positions are a bias by distance; norms have no mean; no biases."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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

FAMILIES = ("t5", "mt5", "umt5")


def stack(model: Any, join: Join) -> Stack:
    """The decoder of a T5ForConditionalGeneration or of its like."""
    config, decoder = model.config, model.decoder
    attention = decoder.block[0].layer[0].SelfAttention
    feed = decoder.block[0].layer[-1].DenseReluDense
    shape = Shape(
        heads=attention.n_heads,
        head_dim=attention.key_value_proj_dim,
        scale=float(getattr(attention, "scaling", 1.0)),
        is_gated=bool(config.is_gated_act),
        norms_after=False,
        activation=activation_of(config.dense_act_fn, feed.act),
        activation_name=config.dense_act_fn,
    )
    embedding = decoder.embed_tokens

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        return embedding(tokens)  # type: ignore[no-any-return]

    blocks = tuple(_block(block, join) for block in decoder.block)
    scale = config.d_model**-0.5 if _scales_states(config) else 1.0
    head = Head(join([model.lm_head]), scale)
    biases = distance_biases([block.layer[0].SelfAttention for block in decoder.block])
    return Stack(shape, embed, blocks, Norm.of(decoder.final_layer_norm), head, biases)


def _scales_states(config: Any) -> bool:
    """T5 1.0, whose logits' matrix is its embeddings, makes the states smaller; T5 1.1 and mT5 do not."""
    if config.model_type == "mt5":
        return False
    named = getattr(config, "scale_decoder_outputs", None)
    return bool(config.tie_word_embeddings if named is None else named)


def _block(module: Any, join: Join) -> Block:
    own, cross, feed = module.layer[0], module.layer[1], module.layer[2]
    a, c, d = own.SelfAttention, cross.EncDecAttention, feed.DenseReluDense
    return Block(
        own_norm=Norm.of(own.layer_norm),
        qkv=join([a.q, a.k, a.v]),
        own_out=join([a.o]),
        cross_norm=Norm.of(cross.layer_norm),
        query=join([c.q]),
        cross_kv=join([c.k, c.v]),
        cross_out=join([c.o]),
        inner_norm=Norm.of(feed.layer_norm),
        wide=join([d.wi_0, d.wi_1]) if hasattr(d, "wi_0") else join([d.wi]),
        narrow=join([d.wo]),
    )


def distance_biases(attentions: Sequence[Any]) -> tuple[Tensor, ...]:
    """[far + 1, H] for each attention that has a table of its own: what is added for a key so many tokens back. From
    `far` on it is the same."""
    found = []
    for attention in attentions:
        if not attention.has_relative_attention_bias:
            continue
        table = attention.relative_attention_bias.weight.detach()  # [buckets, H]
        distance = torch.arange(attention.relative_attention_max_distance + 1, device=table.device)
        found.append(table[buckets(attention, -distance)])
    return tuple(found)


def encoder(model: Any) -> EncoderParts:
    """The encoder's layers."""
    module = model.get_encoder()
    first = module.block[0].layer[0].SelfAttention
    words = module.embed_tokens
    attentions = [block.layer[0].SelfAttention for block in module.block]
    found = [_both_sides(attention) for attention in attentions if attention.has_relative_attention_bias]

    def embed(tokens: Tensor, positions: Tensor) -> Tensor:
        return words(tokens)  # type: ignore[no-any-return]

    return EncoderParts(
        heads=first.n_heads,
        head_dim=first.key_value_proj_dim,
        embed=embed,
        blocks=tuple(_encoder_block(block) for block in module.block),
        norm=Norm.of(module.final_layer_norm),
        biases=tuple(found if len(found) > 1 else found * len(attentions)),
    )


def _encoder_block(module: Any) -> EncoderBlock:
    own, feed = module.layer[0], module.layer[1]
    a, d = own.SelfAttention, feed.DenseReluDense
    return EncoderBlock(
        own_norm=Norm.of(own.layer_norm),
        qkv=Product([a.q, a.k, a.v], False),
        out=Product([a.o], False),
        inner_norm=Norm.of(feed.layer_norm),
        wide=Product([d.wi_0, d.wi_1] if hasattr(d, "wi_0") else [d.wi], False),
        narrow=Product([d.wo], False),
    )


def _both_sides(attention: Any) -> Tensor:
    table, far = attention.relative_attention_bias.weight.detach(), attention.relative_attention_max_distance
    relative = torch.arange(-far, far + 1, device=table.device)
    found: Tensor = table[buckets(attention, relative, is_decoder=False)]
    return found


def buckets(attention: Any, relative: Tensor, is_decoder: bool = True) -> Tensor:
    """Of key position minus query position, as the module itself does it."""
    count, far = attention.relative_attention_num_buckets, attention.relative_attention_max_distance
    make = attention._relative_position_bucket
    if isinstance(type(attention).__dict__.get("_relative_position_bucket"), staticmethod):
        return make(relative, bidirectional=not is_decoder, num_buckets=count, max_distance=far)  # type: ignore[no-any-return]
    return make(relative)  # type: ignore[no-any-return]
