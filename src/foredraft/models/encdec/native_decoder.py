"""Decoder of encoder-decoder models as one native call per forward pass, on CPU (kernels/cpu/encdec.h).

torch embeds the rows, since embedding differs by family. The layers and the head are native. The bits of a row do not
depend on the rows computed with it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import (
    NativeLibrary,
    NormRecord,
    PassRecord,
    Seq2SeqLayerRecord,
    Seq2SeqRecord,
    load_library,
)
from foredraft.kernels.linear import DTYPE_KINDS, PackedWeight
from foredraft.kernels.linear import linear as native_linear
from foredraft.kernels.rows import PackedRows
from foredraft.kv.pool import KVPool
from foredraft.models.encdec import decoder
from foredraft.models.encdec.cross_kv import SOURCE_PAGE_SIZE, CrossKVCache, SourcePages
from foredraft.models.encdec.decoder import DecoderBlock, DecoderStack, MergedLinear, PackWeight
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.native.packing import LANES, interleave_rows

# Code of the native library by transformers' name of the activation.
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "relu": 2, "gelu": 3}
GATED_ACTIVATIONS = (0, 1)  # codes that the library has for a gated MLP


def explain_unsupported(model: Any, decoder: DecoderStack) -> str | None:
    """Return the reason why a decoder cannot run as native code; None if it can.

    Args:
        model: transformers model.
        decoder: its decoder.
    """
    shape = decoder.shape
    norms = [norm for block in decoder.blocks for norm in (block.self_norm, block.cross_norm, block.mlp_norm)]
    if model.device.type != "cpu" or model.dtype not in DTYPE_KINDS:
        return f"{model.dtype} on {model.device.type}"
    if load_library() is None:
        return "no native kernels"
    if shape.head_dim % LANES:
        return f"heads of width {shape.head_dim}"
    kind = ACTIVATIONS.get(shape.activation_name)
    if kind is None or (shape.is_gated and kind not in GATED_ACTIVATIONS):
        return f"the activation {shape.activation_name}"
    if len({(norm.eps, norm.bias is None) for norm in [*norms, *([decoder.norm] if decoder.norm else [])]}) > 1:
        return "norms of several kinds"
    return None


@dataclass
class NativeSeq2SeqDecoder:
    """Decoder in the native layout: a record, and the memory to which it points."""

    native: NativeLibrary
    record: Seq2SeqRecord
    weights: list[PackedWeight]  # keeps the record's weights alive
    cross_kv_weights: list[PackedWeight]  # by layer
    tensors: list[Tensor]  # keeps the record's norms and biases alive
    kv_sample: Tensor  # [0, H, D] shape and dtype of keys and values
    vocab_size: int  # number of input tokens
    _free_scratch: list[Tensor] = field(default_factory=list)  # scratch memory, one tensor per concurrent pass

    @classmethod
    def from_decoder(
        cls, model: Any, decoder: DecoderStack, pack: PackWeight, pack_head: PackWeight, is_owned: bool
    ) -> "NativeSeq2SeqDecoder":
        """Pack a decoder for which `explain_unsupported` returned None.

        Args:
            model: transformers model.
            decoder: its decoder.
            pack: packs a matrix.
            pack_head: packs the matrix of the head.
            is_owned: whether to free each weight after it is packed.
        """
        native = load_library()
        assert native is not None, "explain_unsupported was not called"
        packer = Seq2SeqPacker(pack, is_owned)
        record = packer.build_record(decoder, model.dtype == torch.bfloat16, pack_head)
        sample = torch.empty(0, decoder.shape.heads, decoder.shape.head_dim, dtype=model.dtype)
        size = len(model.get_decoder().embed_tokens.weight)
        return cls(native, record, packer.weights, packer.cross_kv_weights, packer.tensors, sample, size)

    def project_cross_kv(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Compute the cross-attention keys and values [T, H, D] of every layer from encoder states [T, hidden]."""
        sizes = (2, self.record.heads, self.record.head_dim)
        rows = states.float()
        pairs = (
            native_linear(rows, weight).to(self.kv_sample.dtype).view(-1, *sizes) for weight in self.cross_kv_weights
        )
        return [(pair[:, 0], pair[:, 1]) for pair in pairs]

    def forward(
        self,
        forward_batch: ForwardBatch,
        inputs: Tensor,
        pool: KVPool,
        cross_kv: CrossKVCache,
        source_pages: Sequence[SourcePages],
        hidden_layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """Run one forward pass.

        Args:
            forward_batch: T packed rows.
            inputs: embedded rows [T, hidden].
            pool: self-attention KV.
            cross_kv: cross-attention KV.
            source_pages: pages of the source, by span.
            hidden_layers: layer boundaries to return.

        Returns:
            Logits [R, V] and hidden states [T, F] at the boundaries, concatenated, or None; both float32.
        """
        record, rows, sources = self.record, forward_batch.packed_rows, pack_source_rows(forward_batch, source_pages)
        pool.reserve([self.kv_sample] * record.layers, forward_batch.num_slots)
        inputs = inputs.float().contiguous()
        logits = torch.empty(rows.num_logits, record.head.n, dtype=torch.float32)
        width = len(hidden_layers) * record.hidden
        features = torch.empty(rows.num_rows, width, dtype=torch.float32) if hidden_layers else None
        self.native.sync_threads()
        handle = self.native.handle
        scratch = self._take_scratch(handle.fd_encdec_scratch(record, rows.record, sources.record))
        (keys, values), (cross_keys, cross_values) = pool.addresses, cross_kv.pool.addresses
        boundaries = (ctypes.c_int32 * len(hidden_layers))(*hidden_layers)
        job = PassRecord(
            *(ctypes.addressof(each) for each in (keys, values, cross_keys, cross_values, boundaries)),
            hidden_layer_count=len(hidden_layers),
            inputs=inputs.data_ptr(),
            features=None if features is None else features.data_ptr(),
            logits=logits.data_ptr(),
            scratch=scratch.data_ptr(),
        )
        handle.fd_encdec_forward(record, rows.record, sources.record, job)
        self._free_scratch.append(scratch)
        return logits, features

    def _take_scratch(self, size: int) -> Tensor:
        """Take scratch memory of at least `size` bytes. Passes in other threads have their own."""
        try:
            scratch = self._free_scratch.pop()
        except IndexError:
            return torch.empty(size, dtype=torch.uint8)
        # A larger allocation than needed, so that growing sequences rarely reallocate.
        return scratch if len(scratch) >= size else torch.empty(2 * size, dtype=torch.uint8)


def pack_source_rows(forward_batch: ForwardBatch, source_pages: Sequence[SourcePages]) -> PackedRows:
    """Pack rows that see the whole source of their request and nothing else.

    Args:
        forward_batch: T packed rows.
        source_pages: pages of the source, by span.
    """
    pages: list[int] = []
    page_at: list[int] = []
    length: list[int] = []
    for span, source in zip(forward_batch.spans, source_pages, strict=True):
        n = len(span.tokens)
        page_at += [len(pages)] * n
        length += [source.num_tokens] * n
        pages += source.pages
    zeros = [0] * len(length)
    lists = [zeros, zeros, pages, page_at, [], zeros, length, zeros, []]
    numbers = torch.tensor([number for each in lists for number in each], dtype=torch.int32)
    return PackedRows.from_numbers_with_longest(numbers, [len(each) for each in lists], SOURCE_PAGE_SIZE, max(length))


@dataclass
class Seq2SeqPacker:
    """Packs a decoder layer by layer. Its lists keep the memory alive to which the records point."""

    pack: PackWeight
    is_owned: bool  # whether to free each weight after it is packed
    arena: Arena = field(default_factory=Arena)
    weights: list[PackedWeight] = field(default_factory=list)
    cross_kv_weights: list[PackedWeight] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def build_record(self, decoder: DecoderStack, has_bf16: bool, pack_head: PackWeight) -> Seq2SeqRecord:
        """Build the native record of a decoder.

        Args:
            decoder: decoder whose weights are packed.
            has_bf16: whether keys and values are bfloat16, otherwise float32.
            pack_head: packs the matrix of the head.
        """
        shape, head = decoder.shape, decoder.head
        biases = decoder.position_biases or ()
        tables = [self.hold_tensor(table.T.flip(1)) for table in biases]  # [H, far + 1], the largest distance first
        layer_tables = [tables[i if len(tables) > 1 else 0] if tables else None for i in range(len(decoder.blocks))]
        blocks = zip(decoder.blocks, layer_tables, strict=True)
        layers = (Seq2SeqLayerRecord * len(decoder.blocks))(
            *(self._build_layer(block, shape.is_gated, table) for block, table in blocks)
        )
        mlp_width = layers[0].mlp_in.n
        bias = head.bias if head.bias is not None else head.linear.bias
        packed_head = pack_head(head.linear.dense_weight, bias, self.arena)
        self.weights.append(packed_head)
        return Seq2SeqRecord(
            layers=len(layers),
            hidden=layers[0].qkv.k,
            heads=shape.heads,
            head_dim=shape.head_dim,
            inner=mlp_width // 2 if shape.is_gated else mlp_width,
            activation=ACTIVATIONS[shape.activation_name],
            is_gated=shape.is_gated,
            is_post_norm=shape.is_post_norm,
            has_bf16_kv=has_bf16,
            max_distance=len(biases[0]) - 1 if biases else 0,
            eps=decoder.blocks[0].self_norm.eps,
            scale=shape.scale,
            logit_scale=head.scale,
            norm=NormRecord(None, None) if decoder.norm is None else self.hold_norm(decoder.norm),
            layer=ctypes.cast(layers, ctypes.POINTER(Seq2SeqLayerRecord)),
            head=packed_head.record,
        )

    def _build_layer(self, block: DecoderBlock, is_gated: bool, table: int | None) -> Seq2SeqLayerRecord:
        self.cross_kv_weights.append(self.pack_linear(block.cross_kv))
        packed = [self.pack_linear(each) for each in (block.qkv, block.self_out, block.cross_query, block.cross_out)]
        packed += [self.pack_mlp_in(block.mlp_in, is_gated), self.pack_linear(block.mlp_out)]
        self.weights += packed
        norms = [self.hold_norm(norm) for norm in (block.self_norm, block.cross_norm, block.mlp_norm)]
        return Seq2SeqLayerRecord(*norms, *(each.record for each in packed), table)

    def pack_mlp_in(self, linear: MergedLinear, is_gated: bool) -> PackedWeight:
        """Pack the first matrix of an MLP. The rows of gate and value are interleaved if it is gated."""
        dense, bias = linear.dense_weight, linear.bias
        if is_gated:
            dense = interleave_rows(dense.chunk(2))
            bias = None if bias is None else interleave_rows([half[:, None] for half in bias.chunk(2)])[:, 0]
        packed = self.pack(dense, bias, self.arena)
        if self.is_owned:
            linear.release()
        return packed

    def pack_linear(self, linear: MergedLinear) -> PackedWeight:
        """Pack a linear layer."""
        packed = self.pack(linear.dense_weight, linear.bias, self.arena)
        if self.is_owned:
            linear.release()
        return packed

    def hold_norm(self, norm: decoder.Seq2SeqNorm) -> NormRecord:
        """Build the record of a norm and keep its float32 tensors alive."""
        return NormRecord(self.hold_tensor(norm.weight), None if norm.bias is None else self.hold_tensor(norm.bias))

    def hold_tensor(self, tensor: Tensor) -> int:
        """Convert a tensor to float32, keep it alive and return its address."""
        self.tensors.append(tensor.detach().float().contiguous())
        return self.tensors[-1].data_ptr()
