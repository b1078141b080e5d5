"""The decoder of an encoder-decoder model as one native call per pass, on CPU: what kernels/cpu/pair.h computes.

Rows are embedded by torch, which knows the families apart; everything from there to the logits is native. A row's bits
do not depend on the rows computed with it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import Library, Norm, Pair, PairLayer, PairPass, library
from foredraft.kernels.linear import KINDS, PackedWeight
from foredraft.kernels.linear import linear as native_linear
from foredraft.kernels.rows import PackedRows
from foredraft.kv.pool import KVPool
from foredraft.models import encdec_decoder
from foredraft.models.encdec_decoder import Block, Packer, Product, Stack
from foredraft.models.encdec_memory import PAGE, Place, SourceMemory
from foredraft.models.fused import LANES, interleaved
from foredraft.models.window import Window

ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "relu": 2, "gelu": 3}
GATES = (0, 1)


def why_not(model: Any, stack: Stack) -> str | None:
    """Why a decoder stays with torch's operators; None if it can run natively."""
    shape = stack.shape
    norms = [norm for block in stack.blocks for norm in (block.own_norm, block.cross_norm, block.inner_norm)]
    if model.device.type != "cpu" or model.dtype not in KINDS:
        return f"{model.dtype} on {model.device.type}"
    if library() is None:
        return "no native kernels"
    if shape.head_dim % LANES:
        return f"heads of width {shape.head_dim}"
    kind = ACTIVATIONS.get(shape.activation_name)
    if kind is None or (shape.is_gated and kind not in GATES):
        return f"the activation {shape.activation_name}"
    if len({(norm.eps, norm.bias is None) for norm in [*norms, *([stack.norm] if stack.norm else [])]}) > 1:
        return "norms of several kinds"
    return None


@dataclass
class FusedPair:
    """The native side's view of a decoder, and what it points to."""

    native: Library
    record: Pair
    weights: list[PackedWeight]
    cross_kv: list[PackedWeight]  # of every layer
    tensors: list[Tensor]
    sample: Tensor  # [0, H, D] of keys and values
    vocab_size: int  # of the tokens it reads
    _free: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model: Any, stack: Stack, pack: Packer, pack_head: Packer, is_ours: bool) -> "FusedPair":
        """Pack a decoder for which `why_not` is None. One that is ours gives up each weight as it is packed."""
        native = library()
        assert native is not None, "why_not was not asked"
        packing = Packing(pack, is_ours)
        record = packing.record(stack, model.dtype == torch.bfloat16, pack_head)
        sample = torch.empty(0, stack.shape.heads, stack.shape.head_dim, dtype=model.dtype)
        size = len(model.get_decoder().embed_tokens.weight)
        return cls(native, record, packing.weights, packing.cross_kv, packing.tensors, sample, size)

    def read(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [T, H, D] of every layer, of what the encoder made of sources [T, hidden]."""
        sizes = (2, self.record.heads, self.record.head_dim)
        rows = states.float()
        made = (native_linear(rows, weight).to(self.sample.dtype).view(-1, *sizes) for weight in self.cross_kv)
        return [(both[:, 0], both[:, 1]) for both in made]

    def forward(
        self,
        window: Window,
        inputs: Tensor,
        pool: KVPool,
        memory: SourceMemory,
        places: Sequence[Place],
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] and tapped states [T, F] in float32, of embedded rows [T, hidden]."""
        record, rows, sources = self.record, window.packed, source_rows(window, places)
        pool.reserve([self.sample] * record.layers, window.num_slots)
        inputs = inputs.float().contiguous()
        logits = torch.empty(rows.num_logits, record.head.n)
        features = torch.empty(rows.num_rows, len(taps) * record.hidden) if taps else None
        self.native.follow_threads()
        handle = self.native.handle
        scratch = self._scratch(handle.fd_pair_scratch(record, rows.record, sources.record))
        (keys, values), (cross_keys, cross_values) = pool.addresses, memory.pool.addresses
        boundaries = (ctypes.c_int32 * len(taps))(*taps)
        job = PairPass(
            *(ctypes.addressof(each) for each in (keys, values, cross_keys, cross_values, boundaries)),
            len(taps),
            inputs.data_ptr(),
            None if features is None else features.data_ptr(),
            logits.data_ptr(),
            scratch.data_ptr(),
        )
        handle.fd_pair_forward(record, rows.record, sources.record, job)
        self._free.append(scratch)
        return logits, features

    def _scratch(self, size: int) -> Tensor:
        try:
            held = self._free.pop()
        except IndexError:
            return torch.empty(size, dtype=torch.uint8)
        return held if len(held) >= size else torch.empty(2 * size, dtype=torch.uint8)


def source_rows(window: Window, places: Sequence[Place]) -> PackedRows:
    """Every row sees the whole source of its request and nothing else."""
    pages: list[int] = []
    page_at: list[int] = []
    length: list[int] = []
    for span, place in zip(window.spans, places, strict=True):
        n = len(span.tokens)
        page_at += [len(pages)] * n
        length += [place.length] * n
        pages += place.pages
    nothing = [0] * len(length)
    lists = [nothing, nothing, pages, page_at, [], nothing, length, nothing, []]
    numbers = torch.tensor([number for each in lists for number in each], dtype=torch.int32)
    return PackedRows.held(numbers, [len(each) for each in lists], PAGE, max(length))


@dataclass
class Packing:
    """Packs a decoder layer by layer and keeps alive what the records point to."""

    pack: Packer
    is_ours: bool
    arena: Arena = field(default_factory=Arena)
    weights: list[PackedWeight] = field(default_factory=list)
    cross_kv: list[PackedWeight] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def record(self, stack: Stack, has_bf16: bool, pack_head: Packer) -> Pair:
        shape, head = stack.shape, stack.head
        biases = stack.biases or ()
        tables = [self.kept(table.T.flip(1)) for table in biases]  # from far to near
        of_layer = [tables[i if len(tables) > 1 else 0] if tables else None for i in range(len(stack.blocks))]
        blocks = zip(stack.blocks, of_layer, strict=True)
        layers = (PairLayer * len(stack.blocks))(
            *(self._layer(block, shape.is_gated, table) for block, table in blocks)
        )
        wide = layers[0].wide.n
        bias = head.bias if head.bias is not None else head.product.bias
        packed = pack_head(head.product.dense, bias, self.arena)
        self.weights.append(packed)
        return Pair(
            layers=len(layers),
            hidden=layers[0].qkv.k,
            heads=shape.heads,
            head_dim=shape.head_dim,
            inner=wide // 2 if shape.is_gated else wide,
            activation=ACTIVATIONS[shape.activation_name],
            is_gated=shape.is_gated,
            norms_after=shape.norms_after,
            has_bf16_kv=has_bf16,
            far=len(biases[0]) - 1 if biases else 0,
            eps=stack.blocks[0].own_norm.eps,
            scale=shape.scale,
            logit_scale=head.scale,
            norm=Norm(None, None) if stack.norm is None else self.norm(stack.norm),
            layer=ctypes.cast(layers, ctypes.POINTER(PairLayer)),
            head=packed.record,
        )

    def _layer(self, block: Block, is_gated: bool, table: int | None) -> PairLayer:
        self.cross_kv.append(self.joined(block.cross_kv))
        packed = [self.joined(each) for each in (block.qkv, block.own_out, block.query, block.cross_out)]
        packed += [self.wide(block.wide, is_gated), self.joined(block.narrow)]
        self.weights += packed
        norms = [self.norm(norm) for norm in (block.own_norm, block.cross_norm, block.inner_norm)]
        return PairLayer(*norms, *(each.record for each in packed), table)

    def wide(self, product: Product, is_gated: bool) -> PackedWeight:
        dense, bias = product.dense, product.bias
        if is_gated:
            dense = interleaved(dense.chunk(2))
            bias = None if bias is None else interleaved([half[:, None] for half in bias.chunk(2)])[:, 0]
        made = self.pack(dense, bias, self.arena)
        if self.is_ours:
            product.release()
        return made

    def joined(self, product: Product) -> PackedWeight:
        made = self.pack(product.dense, product.bias, self.arena)
        if self.is_ours:
            product.release()
        return made

    def norm(self, norm: encdec_decoder.Norm) -> Norm:
        return Norm(self.kept(norm.weight), None if norm.bias is None else self.kept(norm.bias))

    def kept(self, tensor: Tensor) -> int:
        """The address of its numbers in float32."""
        self.tensors.append(tensor.detach().float().contiguous())
        return self.tensors[-1].data_ptr()
