"""Encoders of text as one native call, on CPU: rows of several sources side by side, each of which sees its own.

The layers are the decoder's without what reads a source (kernels/cpu/pair.h); T5's bias is by distance to both sides.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.cpu.library import Library, Norm, Pair, PairLayer, PairPass, Weight, library
from foredraft.kernels.linear import PackedWeight
from foredraft.kv.pool import KVPool
from foredraft.models import encdec_bart, encdec_t5
from foredraft.models.encdec_decoder import Packer, Shape
from foredraft.models.encdec_fused import ACTIVATIONS, Packing, source_rows
from foredraft.models.encdec_memory import PAGE, Place
from foredraft.models.window import NORMED, Span, Window

Embed = Callable[[Tensor, Tensor], Tensor]
NOTHING = Weight()


@dataclass
class NativeEncoder:
    """States of sources, row by row: a row's bits do not depend on what is encoded with it."""

    native: Library
    record: Pair
    embed: Embed
    sample: Tensor  # [0, H, D] of keys and values
    weights: list[PackedWeight]
    tensors: list[Tensor]
    pool: KVPool = field(default_factory=lambda: KVPool(is_native=True))

    @classmethod
    def of(cls, model: Any, shape: Shape, pack: Packer, is_ours: bool) -> "NativeEncoder | None":
        """None where the encoder is none of text, or its layers are shaped unlike the decoder's."""
        native = library()
        module = model.get_encoder()
        if native is None or model.main_input_name != "input_ids":
            return None
        is_t5 = model.config.model_type in encdec_t5.FAMILIES
        parts = encdec_t5.encoder(model) if is_t5 else encdec_bart.encoder(model)
        if (parts.heads, parts.head_dim) != (shape.heads, shape.head_dim):
            return None
        packing = Packing(pack, is_ours)
        layers = []
        for block, bias in zip(parts.blocks, parts.biases or [None] * len(parts.blocks), strict=True):
            table = None if bias is None else packing.kept(bias.T)
            norms = [packing.norm(norm) for norm in (block.own_norm, block.own_norm, block.inner_norm)]
            packed = packing.joined(block.qkv), packing.joined(block.out)
            wide, narrow = packing.wide(block.wide, shape.is_gated), packing.joined(block.narrow)
            records = packed[0].record, packed[1].record, NOTHING, NOTHING, wide.record, narrow.record
            packing.weights += [*packed, wide, narrow]
            layers.append(PairLayer(*norms, *records, table))
        held = (PairLayer * len(layers))(*layers)
        width = layers[0].wide.n
        record = Pair(
            layers=len(layers),
            hidden=layers[0].qkv.k,
            heads=shape.heads,
            head_dim=shape.head_dim,
            inner=width // 2 if shape.is_gated else width,
            activation=ACTIVATIONS[shape.activation_name],
            is_gated=shape.is_gated,
            norms_after=shape.norms_after,
            has_bf16_kv=model.dtype == torch.bfloat16,
            far=len(parts.biases[0]) // 2 if parts.biases else 0,
            is_encoder=True,
            eps=parts.blocks[0].own_norm.eps,
            scale=shape.scale,
            logit_scale=1.0,
            norm=Norm(None, None) if parts.norm is None else packing.norm(parts.norm),
            layer=ctypes.cast(held, ctypes.POINTER(PairLayer)),
        )
        sample = torch.empty(0, shape.heads, shape.head_dim, dtype=module.dtype)
        return cls(native, record, parts.embed, sample, packing.weights, packing.tensors)

    def states(self, sources: Sequence[Sequence[int]]) -> list[Tensor]:
        """[S, hidden] of each, in float32."""
        spans, places, first = [], [], 1
        for tokens in sources:
            pages = range(first, first + -(-len(tokens) // PAGE))
            first = pages.stop
            spans.append(Span(pages, 0, tokens, range(len(tokens))))
            places.append(Place(tuple(pages), len(tokens)))
        window = Window.build(spans, [], PAGE, "cpu")
        rows, seen = window.packed, source_rows(window, places)
        self.pool.reserve([self.sample] * self.record.layers, window.num_slots)
        inputs = self.embed(window.tokens[0], window.positions[0]).float().contiguous()
        out = torch.empty(rows.num_rows, self.record.hidden)
        self.native.follow_threads()
        size = self.native.handle.fd_pair_scratch(self.record, rows.record, seen.record)
        scratch = torch.empty(size, dtype=torch.uint8)
        keys, values = self.pool.addresses
        boundary = (ctypes.c_int32 * 1)(NORMED)
        job = PairPass(
            ctypes.addressof(keys), ctypes.addressof(values), None, None, ctypes.addressof(boundary), 1,
            inputs.data_ptr(), out.data_ptr(), None, scratch.data_ptr(),
        )  # fmt: skip
        self.native.handle.fd_pair_forward(self.record, rows.record, seen.record, job)
        return list(torch.split(out, [len(tokens) for tokens in sources]))
