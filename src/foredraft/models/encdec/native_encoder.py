"""Encoders of text as one native call, on CPU: rows of several sources side by side, each of which sees its own.

The layers are the decoder's without what reads a source (kernels/cpu/pair.h); T5's bias is by distance to both sides.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.cpu.library import (
    NativeLibrary,
    NormRecord,
    Seq2SeqLayerRecord,
    Seq2SeqPassRecord,
    Seq2SeqRecord,
    WeightRecord,
    load_library,
)
from foredraft.kernels.linear import PackedWeight
from foredraft.kv.pool import KVPool
from foredraft.models.encdec import bart, t5
from foredraft.models.encdec.cross_kv import SOURCE_PAGE_SIZE, SourcePages
from foredraft.models.encdec.decoder import DecoderShape, PackWeight
from foredraft.models.encdec.native_decoder import ACTIVATIONS, Seq2SeqPacker, pack_source_rows
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch, Span

EmbedTokens = Callable[[Tensor, Tensor], Tensor]
NO_WEIGHT = WeightRecord()


@dataclass
class NativeEncoder:
    """States of sources, row by row: a row's bits do not depend on what is encoded with it."""

    native: NativeLibrary
    record: Seq2SeqRecord
    embed: EmbedTokens
    kv_sample: Tensor  # [0, H, D] of keys and values
    weights: list[PackedWeight]
    tensors: list[Tensor]
    pool: KVPool = field(default_factory=lambda: KVPool(is_native=True))

    @classmethod
    def from_model(cls, model: Any, shape: DecoderShape, pack: PackWeight, is_owned: bool) -> "NativeEncoder | None":
        """None where the encoder is none of text, or its layers are shaped unlike the decoder's."""
        native = load_library()
        module = model.get_encoder()
        if native is None or model.main_input_name != "input_ids":
            return None
        is_t5 = model.config.model_type in t5.FAMILIES
        parts = t5.build_encoder(model) if is_t5 else bart.build_encoder(model)
        if (parts.heads, parts.head_dim) != (shape.heads, shape.head_dim):
            return None
        packing = Seq2SeqPacker(pack, is_owned)
        layers = []
        for block, bias in zip(parts.blocks, parts.position_biases or [None] * len(parts.blocks), strict=True):
            table = None if bias is None else packing.hold_tensor(bias.T)
            norms = [packing.hold_norm(norm) for norm in (block.self_norm, block.self_norm, block.mlp_norm)]
            packed = packing.pack_linear(block.qkv), packing.pack_linear(block.self_out)
            wide, narrow = packing.pack_mlp_in(block.mlp_in, shape.is_gated), packing.pack_linear(block.mlp_out)
            records = packed[0].record, packed[1].record, NO_WEIGHT, NO_WEIGHT, wide.record, narrow.record
            packing.weights += [*packed, wide, narrow]
            layers.append(Seq2SeqLayerRecord(*norms, *records, table))
        held = (Seq2SeqLayerRecord * len(layers))(*layers)
        width = layers[0].wide.n
        record = Seq2SeqRecord(
            layers=len(layers),
            hidden=layers[0].qkv.k,
            heads=shape.heads,
            head_dim=shape.head_dim,
            inner=width // 2 if shape.is_gated else width,
            activation=ACTIVATIONS[shape.activation_name],
            is_gated=shape.is_gated,
            norms_after=shape.is_post_norm,
            has_bf16_kv=model.dtype == torch.bfloat16,
            far=len(parts.position_biases[0]) // 2 if parts.position_biases else 0,
            is_encoder=True,
            eps=parts.blocks[0].self_norm.eps,
            scale=shape.scale,
            logit_scale=1.0,
            norm=NormRecord(None, None) if parts.norm is None else packing.hold_norm(parts.norm),
            layer=ctypes.cast(held, ctypes.POINTER(Seq2SeqLayerRecord)),
        )
        sample = torch.empty(0, shape.heads, shape.head_dim, dtype=module.dtype)
        return cls(native, record, parts.embed, sample, packing.weights, packing.tensors)

    def encode_sources(self, sources: Sequence[Sequence[int]]) -> list[Tensor]:
        """[S, hidden] of each, in float32."""
        spans, places, first = [], [], 1
        for tokens in sources:
            pages = range(first, first + -(-len(tokens) // SOURCE_PAGE_SIZE))
            first = pages.stop
            spans.append(Span(pages, 0, tokens, range(len(tokens))))
            places.append(SourcePages(tuple(pages), len(tokens)))
        window = ForwardBatch.build(spans, [], SOURCE_PAGE_SIZE, "cpu")
        rows, seen = window.packed_rows, pack_source_rows(window, places)
        self.pool.reserve([self.kv_sample] * self.record.layers, window.num_slots)
        inputs = self.embed(window.tokens[0], window.positions[0]).float().contiguous()
        out = torch.empty(rows.num_rows, self.record.hidden)
        self.native.sync_threads()
        size = self.native.handle.fd_pair_scratch(self.record, rows.record, seen.record)
        scratch = torch.empty(size, dtype=torch.uint8)
        keys, values = self.pool.addresses
        boundary = (ctypes.c_int32 * 1)(AFTER_FINAL_NORM)
        job = Seq2SeqPassRecord(
            ctypes.addressof(keys), ctypes.addressof(values), None, None, ctypes.addressof(boundary), 1,
            inputs.data_ptr(), out.data_ptr(), None, scratch.data_ptr(),
        )  # fmt: skip
        self.native.handle.fd_pair_forward(self.record, rows.record, seen.record, job)
        return list(torch.split(out, [len(tokens) for tokens in sources]))
