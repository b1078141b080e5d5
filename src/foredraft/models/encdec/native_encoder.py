"""Text encoders as one native call on CPU: packed rows of several sources, each of which sees its own source.

The layers are the native decoder's without cross-attention (kernels/cpu/encdec.h). T5's bias depends on the distance in
both directions.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.cpu.library import NativeLibrary, load_library
from foredraft.kernels.cpu.records import (
    KV_KINDS,
    NormRecord,
    PassRecord,
    Seq2SeqLayerRecord,
    Seq2SeqRecord,
    WeightRecord,
)
from foredraft.kernels.linear import PackedWeight
from foredraft.kernels.rows import PackedRows
from foredraft.kv.pool import KVPool
from foredraft.models.encdec import bart, t5
from foredraft.models.encdec.cross_kv import FIRST_PAGE, SOURCE_PAGE_SIZE, SourcePages
from foredraft.models.encdec.decoder import DecoderShape, PackWeight
from foredraft.models.encdec.native_decoder import ACTIVATIONS, Seq2SeqPacker, pack_source_rows
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch, Span

EmbedTokens = Callable[[Tensor, Tensor], Tensor]  # (token ids [T], positions [T]) -> [T, H]
NO_WEIGHT = WeightRecord()  # in place of the weights of cross-attention


@dataclass
class NativeEncoder:
    """Text encoder in the native layout. The bits of a source's states do not depend on the sources encoded with it."""

    native: NativeLibrary
    record: Seq2SeqRecord
    embed: EmbedTokens
    kv_sample: Tensor  # [0, H, D] shape and dtype of keys and values
    weights: list[PackedWeight]  # keeps the record's weights alive
    tensors: list[Tensor]  # keeps the record's norms and biases alive
    pool: KVPool = field(default_factory=lambda: KVPool(is_native=True))
    # LLMs that share a model share its encoder, and every call writes to the pool from its first page on.
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def from_model(cls, model: Any, shape: DecoderShape, pack: PackWeight, is_owned: bool) -> "NativeEncoder | None":
        """Pack the encoder of a model.

        Args:
            model: transformers encoder-decoder model.
            shape: dimensions of its decoder.
            pack: packs a matrix.
            is_owned: whether to free each weight after it is packed.

        Returns:
            The encoder, or None if it does not read text, its heads differ from the decoder's, or there are no native
            kernels.
        """
        native = load_library()
        module = model.get_encoder()
        if native is None or model.main_input_name != "input_ids":
            return None
        is_t5 = model.config.model_type in t5.FAMILIES
        encoder = t5.build_encoder(model) if is_t5 else bart.build_encoder(model)
        if (encoder.heads, encoder.head_dim) != (shape.heads, shape.head_dim):
            return None
        packer = Seq2SeqPacker(pack, is_owned)
        layers = []
        for block, bias in zip(encoder.blocks, encoder.position_biases or [None] * len(encoder.blocks), strict=True):
            table = None if bias is None else packer.hold_tensor(bias.T)
            norms = [packer.hold_norm(norm) for norm in (block.self_norm, block.self_norm, block.mlp_norm)]
            packed = packer.pack_linear(block.qkv), packer.pack_linear(block.self_out)
            mlp_in, mlp_out = packer.pack_mlp_in(block.mlp_in, shape.is_gated), packer.pack_linear(block.mlp_out)
            records = packed[0].record, packed[1].record, NO_WEIGHT, NO_WEIGHT, mlp_in.record, mlp_out.record
            packer.weights += [*packed, mlp_in, mlp_out]
            layers.append(Seq2SeqLayerRecord(*norms, *records, table))
        layer_array = (Seq2SeqLayerRecord * len(layers))(*layers)
        width = layers[0].mlp_in.n
        record = Seq2SeqRecord(
            layers=len(layers),
            hidden=layers[0].qkv.k,
            heads=shape.heads,
            head_dim=shape.head_dim,
            inner=width // 2 if shape.is_gated else width,
            activation=ACTIVATIONS[shape.activation_name],
            is_gated=shape.is_gated,
            is_post_norm=shape.is_post_norm,
            kv_kind=KV_KINDS[model.dtype],
            max_distance=len(encoder.position_biases[0]) // 2 if encoder.position_biases else 0,
            is_encoder=True,
            eps=encoder.blocks[0].self_norm.eps,
            scale=shape.scale,
            logit_scale=1.0,
            norm=NormRecord(None, None) if encoder.norm is None else packer.hold_norm(encoder.norm),
            layer=ctypes.cast(layer_array, ctypes.POINTER(Seq2SeqLayerRecord)),
        )
        sample = torch.empty(0, shape.heads, shape.head_dim, dtype=module.dtype)
        return cls(native, record, encoder.embed, sample, packer.weights, packer.tensors)

    def encode_sources(self, sources: Sequence[Sequence[int]]) -> list[Tensor]:
        """Encode sources given as token ids.

        Returns:
            States [S, hidden] of each source, float32.
        """
        spans, source_pages, first = [], [], FIRST_PAGE
        for tokens in sources:
            pages = range(first, first + -(-len(tokens) // SOURCE_PAGE_SIZE))
            first = pages.stop
            spans.append(Span(pages, 0, tokens, range(len(tokens))))
            source_pages.append(SourcePages(tuple(pages), len(tokens)))
        batch = ForwardBatch.build(spans, [], SOURCE_PAGE_SIZE, "cpu")
        rows, source_rows = batch.packed_rows, pack_source_rows(batch, source_pages)
        with self.lock:
            out = self._run_layers(batch, rows, source_rows)
        return list(torch.split(out, [len(tokens) for tokens in sources]))

    def _run_layers(self, batch: ForwardBatch, rows: PackedRows, source_rows: PackedRows) -> Tensor:
        """Run the native call on packed rows [R]; returns states [R, hidden]."""
        self.pool.reserve([self.kv_sample] * self.record.layers, batch.num_slots)
        inputs = self.embed(batch.tokens[0], batch.positions[0]).float().contiguous()
        out = torch.empty(rows.num_rows, self.record.hidden, dtype=torch.float32)
        self.native.sync_threads()
        size = self.native.handle.fd_encdec_scratch(self.record, rows.record, source_rows.record)
        scratch = torch.empty(size, dtype=torch.uint8)
        keys, values = self.pool.addresses
        boundary = (ctypes.c_int32 * 1)(AFTER_FINAL_NORM)
        job = PassRecord(
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            hidden_layers=ctypes.addressof(boundary),
            hidden_layer_count=1,
            inputs=inputs.data_ptr(),
            features=out.data_ptr(),
            scratch=scratch.data_ptr(),
        )
        self.native.handle.fd_encdec_forward(self.record, rows.record, source_rows.record, job)
        return out
