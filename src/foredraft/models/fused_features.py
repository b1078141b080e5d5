"""EAGLE's layers as one native call per pass: a decoder that begins with a feature beside every token."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import Layer, Model, library
from foredraft.kernels.linear import KINDS, PackedWeight
from foredraft.kv.pool import KVPool
from foredraft.models.block import BlockShape, RMSNorm, Rotary
from foredraft.models.fused import LANES, FusedDecoder, Packing, Table, half, projections
from foredraft.models.window import NORMED, Window

JOINED, PAIRED = 1, 2  # as in foredraft.h


@dataclass(frozen=True)
class Joined:
    """EAGLE-1 and 2: the residual stream begins as fc(cat[e(token), feature])."""

    fc: nn.Linear

    def fields(self, packing: Packing) -> dict[str, Any]:
        """Of the native model."""
        return {"front": JOINED, "join": packing.stacked(self.fc)}


@dataclass(frozen=True)
class Paired:
    """EAGLE-3: it begins as the feature, or its norm. The first layer's attention, of twice the width, reads
    cat[input_layernorm(e(token)), hidden_norm(feature)]."""

    hidden_norm: RMSNorm
    norm_before_residual: bool

    def fields(self, packing: Packing) -> dict[str, Any]:
        return {
            "front": PAIRED,
            "input_norm": packing.norm(self.hidden_norm),
            "norm_before_residual": self.norm_before_residual,
        }


def why_not(layers: Sequence[Any], embedding: Tensor) -> str | None:
    """Why a drafter keeps the plain path; None if it can run fused."""
    first = layers[0].self_attn
    weights = [module.weight for layer in layers for module in projections(layer)]
    dtype = weights[0].dtype
    for tensor in (embedding, *weights):
        if tensor.device.type != "cpu" or tensor.dtype not in KINDS:
            return f"{tensor.dtype} on {tensor.device.type}"
    if any(weight.dtype != dtype for weight in weights):
        return "layers of several types"
    if first.shape.head_dim % LANES:
        return f"heads of width {first.shape.head_dim}"
    if library() is None:
        return "no native kernels"
    return None


@dataclass(frozen=True)
class FusedFeatures:
    """Thread-safe, as the decoder is."""

    decoder: FusedDecoder
    boundary: int  # whose state is the next feature

    @classmethod
    def of(
        cls,
        layers: Sequence[Any],
        front: Joined | Paired,
        norm: RMSNorm | None,
        norm_output: bool,
        embedding: Tensor,
        head: PackedWeight | Tensor,
        shape: BlockShape,
        rotary: Rotary,
        is_ours: bool = True,
        logit_scale: float = 1.0,
    ) -> "FusedFeatures":
        """Pack layers for which `why_not` is None. If they are ours, they and the front give up each weight as it is
        packed. `norm`: before the head, None = none. `norm_output`: it is part of the next feature too. A `head` that
        is packed already is shared."""
        packing = Packing(PackedWeight.pack, is_ours)
        dtype = layers[0].self_attn.q_proj.weight.dtype
        records = (Layer * len(layers))(*(packing.layer(layer, shape.window(i)) for i, layer in enumerate(layers)))
        record = Model(
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
            embedding=packing.rows(embedding),
            norm=packing.norm(norm),
            layer=ctypes.cast(records, ctypes.POINTER(Layer)),
            head=packing.hold(head if isinstance(head, PackedWeight) else _packed(head, packing.arena)),
            **front.fields(packing),
        )
        decoder = FusedDecoder.around(record, packing, dtype, len(embedding), _table(rotary))
        return cls(decoder, NORMED if norm_output else len(layers))

    def forward(self, window: Window, pool: KVPool, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features [T, H] of any floating type, one beside every token -> logits [R, V] and the next features [T, H],
        the residual stream after the layers, both float32."""
        expected = (window.num_rows, self.decoder.record.hidden)
        if features.shape != expected:
            raise ValueError(f"features of shape {list(features.shape)} where {list(expected)} are read")
        logits, following = self.decoder.run(window, pool, (self.boundary,), features.float().contiguous())
        assert following is not None
        return logits, following


def _packed(head: Tensor, arena: Arena) -> PackedWeight:
    return PackedWeight.pack(head, None, arena)


def _table(rotary: Rotary) -> Table:
    def table(positions: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cos, sin = rotary(torch.arange(positions)[None], torch.float32)
        return half(cos[0]), half(sin[0])

    return table
