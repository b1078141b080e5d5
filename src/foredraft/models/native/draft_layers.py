"""EAGLE's layers as one native call per pass: a decoder that begins with a feature beside every token."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import LayerRecord, ModelRecord, load_library
from foredraft.kernels.linear import DTYPE_KINDS, PackedWeight
from foredraft.kv.pool import KVPool
from foredraft.models.draft_layer import DraftLayerShape, RMSNorm, RotaryEmbedding
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch
from foredraft.models.native.decoder import (
    LANES,
    DecoderPacker,
    NativeDecoder,
    RotaryTable,
    list_projections,
    take_first_half,
)

JOINED, PAIRED = 1, 2  # as in foredraft.h


@dataclass(frozen=True)
class JoinedInput:
    """EAGLE-1 and 2: the residual stream begins as fc(cat[e(token), feature])."""

    fc: nn.Linear

    def build_fields(self, packer: DecoderPacker) -> dict[str, Any]:
        """Build the fields of the native model."""
        return {"front": JOINED, "join": packer.pack_stacked(self.fc)}


@dataclass(frozen=True)
class PairedInput:
    """EAGLE-3: it begins as the feature, or its norm. The first layer's attention, of twice the width, reads
    cat[input_layernorm(e(token)), hidden_norm(feature)]."""

    hidden_norm: RMSNorm
    norm_before_residual: bool

    def build_fields(self, packer: DecoderPacker) -> dict[str, Any]:
        return {
            "front": PAIRED,
            "input_norm": packer.hold_norm(self.hidden_norm),
            "norm_before_residual": self.norm_before_residual,
        }


def get_obstacle(layers: Sequence[Any], embedding: Tensor) -> str | None:
    """Why a drafter keeps the plain path; None if it can run fused."""
    first = layers[0].self_attn
    weights = [module.weight for layer in layers for module in list_projections(layer)]
    dtype = weights[0].dtype
    for tensor in (embedding, *weights):
        if tensor.device.type != "cpu" or tensor.dtype not in DTYPE_KINDS:
            return f"{tensor.dtype} on {tensor.device.type}"
    if any(weight.dtype != dtype for weight in weights):
        return "layers of several types"
    if first.shape.head_dim % LANES:
        return f"heads of width {first.shape.head_dim}"
    if load_library() is None:
        return "no native kernels"
    return None


@dataclass(frozen=True)
class NativeDraftLayers:
    """Thread-safe, as the decoder is."""

    decoder: NativeDecoder
    feature_layer: int  # whose state is the next feature

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[Any],
        layer_input: JoinedInput | PairedInput,
        norm: RMSNorm | None,
        has_normed_output: bool,
        embedding: Tensor,
        head: PackedWeight | Tensor,
        shape: DraftLayerShape,
        rotary: RotaryEmbedding,
        is_owned: bool = True,
        logit_scale: float = 1.0,
    ) -> "NativeDraftLayers":
        """Pack layers for which `why_not` is None. If they are ours, they and the front give up each weight as it is
        packed. `norm`: before the head, None = none. `norm_output`: it is part of the next feature too. A `head` that
        is packed already is shared."""
        packing = DecoderPacker(PackedWeight.pack, is_owned)
        dtype = layers[0].self_attn.q_proj.weight.dtype
        records = (LayerRecord * len(layers))(
            *(packing.build_layer(layer, shape.get_sliding_window(i)) for i, layer in enumerate(layers))
        )
        record = ModelRecord(
            layers=len(layers),
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rotary=shape.head_dim,
            inner=records[0].gate_up.n // 2,
            has_bf16_kv=dtype == torch.bfloat16,
            has_bf16_embedding=embedding.dtype == torch.bfloat16,
            eps=shape.eps,
            scale=shape.head_dim**-0.5,
            embedding_scale=1.0,
            residual_scale=1.0,
            logit_scale=logit_scale,
            embedding=packing.hold_tensor(embedding),
            norm=packing.hold_norm(norm),
            layer=ctypes.cast(records, ctypes.POINTER(LayerRecord)),
            head=packing.hold_weight(head if isinstance(head, PackedWeight) else _pack_head(head, packing.arena)),
            **layer_input.build_fields(packing),
        )
        decoder = NativeDecoder.from_record(record, packing, dtype, len(embedding), _make_rotary_table(rotary))
        return cls(decoder, AFTER_FINAL_NORM if has_normed_output else len(layers))

    def forward(self, forward_batch: ForwardBatch, pool: KVPool, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features [T, H] of any floating type, one beside every token -> logits [R, V] and the next features [T, H],
        the residual stream after the layers, both float32."""
        expected = (forward_batch.num_rows, self.decoder.record.hidden)
        if features.shape != expected:
            raise ValueError(f"features of shape {list(features.shape)} where {list(expected)} are read")
        logits, following = self.decoder.run(forward_batch, pool, (self.feature_layer,), features.float().contiguous())
        assert following is not None
        return logits, following


def _pack_head(head: Tensor, arena: Arena) -> PackedWeight:
    return PackedWeight.pack(head, None, arena)


def _make_rotary_table(rotary: RotaryEmbedding) -> RotaryTable:
    def table(positions: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cos, sin = rotary(torch.arange(positions)[None], torch.float32)
        return take_first_half(cos[0]), take_first_half(sin[0])

    return table
