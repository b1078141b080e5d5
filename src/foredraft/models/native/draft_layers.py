"""Layers of a drafter as one native call per forward pass: a decoder that may read a feature beside every token."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import load_library
from foredraft.kernels.cpu.records import KV_KINDS, LayerRecord, ModelRecord
from foredraft.kernels.linear import DTYPE_KINDS, PackedWeight
from foredraft.kv.pool import KVPool
from foredraft.models.draft_layer import DraftLayerShape, RMSNorm, RotaryEmbedding
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch
from foredraft.models.native.decoder import NativeDecoder
from foredraft.models.native.family import FAMILIES, LLAMA
from foredraft.models.native.packing import LANES, DecoderPacker
from foredraft.models.native.rotary import RotaryTables, take_first_half

JOINED, PAIRED = 1, 2  # kinds of input, with the values of foredraft.h


@dataclass(frozen=True)
class TokenInput:
    """Input of a block of masks: the residual stream starts as e(token), without a feature."""

    def build_fields(self, packer: DecoderPacker) -> dict[str, Any]:
        """Return no fields: it is the input of a decoder."""
        return {}


@dataclass(frozen=True)
class JoinedInput:
    """Input of EAGLE-1, EAGLE-2 and MTP layers: the residual stream starts as fc(cat[e(token), feature]).

    The embedding and the feature of an MTP layer are normed.
    """

    fc: nn.Linear
    embedding_norm: Any = None  # None = no norm
    feature_norm: Any = None
    norm_offset: float = 0.0  # added to the weights of norms

    def build_fields(self, packer: DecoderPacker) -> dict[str, Any]:
        """Pack `fc` and the norms, and build the fields of the native record that describe this input."""
        return {
            "input_kind": JOINED,
            "fc": packer.pack_stacked(self.fc),
            "embedding_norm": packer.hold_norm(self.embedding_norm, self.norm_offset),
            "input_norm": packer.hold_norm(self.feature_norm, self.norm_offset),
        }


@dataclass(frozen=True)
class PairedInput:
    """Input of EAGLE-3: the residual stream starts as the feature, or as its norm.

    The attention of the first layer has twice the width. It reads cat[input_layernorm(e(token)), hidden_norm(feature)].
    """

    hidden_norm: RMSNorm
    norm_before_residual: bool  # whether the residual stream starts as hidden_norm(feature)

    def build_fields(self, packer: DecoderPacker) -> dict[str, Any]:
        """Pack `hidden_norm` and build the fields of the native record that describe this input."""
        return {
            "input_kind": PAIRED,
            "input_norm": packer.hold_norm(self.hidden_norm),
            "norm_before_residual": self.norm_before_residual,
        }


def explain_unsupported(layers: Sequence[Any], embedding: Tensor) -> str | None:
    """Return the reason why draft layers cannot run as native code; None if they can.

    Args:
        layers: decoder layers of the drafter.
        embedding: input embedding matrix.
    """
    first = layers[0].self_attn
    weights = [module.weight for layer in layers for module in LLAMA.list_projections(layer)]
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
    """Draft layers in the native layout. Thread-safe, as NativeDecoder is."""

    decoder: NativeDecoder
    feature_layer: int  # layer boundary whose state is the next feature

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[Any],
        layer_input: TokenInput | JoinedInput | PairedInput,
        norm: RMSNorm | None,
        has_normed_output: bool,
        embedding: Tensor,
        lm_head: PackedWeight | Tensor,
        shape: DraftLayerShape,
        rotary: RotaryEmbedding,
        is_owned: bool = True,
        logit_scale: float = 1.0,
    ) -> "NativeDraftLayers":
        """Pack layers for which `explain_unsupported` returned None.

        Args:
            layers: decoder layers.
            layer_input: input of the first layer.
            norm: norm before the output matrix; None = no norm.
            has_normed_output: whether the next feature is the state after `norm`, otherwise before it.
            embedding: input embedding matrix.
            lm_head: output matrix; a packed one is shared.
            shape: dimensions of the layers.
            rotary: computes rotary factors.
            is_owned: whether to free each weight after it is packed. Default True.
            logit_scale: factor of the logits. Default 1.
        """
        packer = DecoderPacker(PackedWeight.pack, is_owned)
        dtype = layers[0].self_attn.q_proj.weight.dtype
        records = (LayerRecord * len(layers))(
            *(packer.build_layer(layer, shape.get_sliding_window(i)) for i, layer in enumerate(layers))
        )
        record = ModelRecord(
            layers=len(layers),
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            rotary=shape.head_dim,
            inner=records[0].gate_up.n // 2,
            kv_kind=KV_KINDS[dtype],
            has_bf16_embedding=embedding.dtype == torch.bfloat16,
            eps=shape.eps,
            scale=shape.head_dim**-0.5,
            embedding_scale=1.0,
            residual_scale=1.0,
            logit_scale=logit_scale,
            embedding=packer.hold_tensor(embedding),
            norm=packer.hold_norm(norm),
            layer=ctypes.cast(records, ctypes.POINTER(LayerRecord)),
            head=packer.hold_weight(
                lm_head if isinstance(lm_head, PackedWeight) else _pack_lm_head(lm_head, packer.arena)
            ),
            **layer_input.build_fields(packer),
        )
        decoder = NativeDecoder.from_record(record, packer, dtype, len(embedding), _make_rotary_tables(rotary))
        return cls(decoder, AFTER_FINAL_NORM if has_normed_output else len(layers))

    @classmethod
    def from_target_layer(
        cls,
        layer: Any,
        layer_input: JoinedInput,
        norm: Any,
        embedding: Tensor,
        lm_head: PackedWeight,
        target: NativeDecoder,
        config: Any,
        sliding_window: int | None,
    ) -> "NativeDraftLayers":
        """Pack one layer of the target's own class; its weights are freed.

        Args:
            layer: decoder layer.
            layer_input: its input.
            norm: norm before the output matrix, whose output is the next feature; None = no norm.
            embedding: input embedding matrix, which is not scaled.
            lm_head: output matrix, which is shared.
            target: native code of the target.
            config: text config of the target.
            sliding_window: maximum number of positions that a row sees; None = all.
        """
        packer, family = DecoderPacker(PackedWeight.pack, is_owned=True), FAMILIES[config.model_type]
        records = (LayerRecord * 1)(packer.build_layer(layer, sliding_window, family, target.record.rotary, config))
        record = ModelRecord.from_buffer_copy(target.record)
        changes = {
            "layers": 1,
            "inner": records[0].gate_up.n // 2 or record.hidden,
            "kv_kind": KV_KINDS[target.dtype],
            "has_bf16_embedding": embedding.dtype == torch.bfloat16,
            "embedding_scale": 1.0,
            "embedding": packer.hold_tensor(embedding),
            "norm": packer.hold_norm(norm, family.norms.offset),
            "layer": ctypes.cast(records, ctypes.POINTER(LayerRecord)),
            "adapter": None,
            **layer_input.build_fields(packer),
            "head": packer.hold_weight(lm_head),
        }
        for name, value in changes.items():
            setattr(record, name, value)
        decoder = NativeDecoder.from_record(record, packer, target.dtype, len(embedding), target.rotary_tables)
        return cls(decoder, AFTER_FINAL_NORM if norm is not None else 1)

    def forward(self, forward_batch: ForwardBatch, pool: KVPool, features: Tensor) -> tuple[Tensor, Tensor]:
        """Run one forward pass.

        Args:
            forward_batch: T packed rows.
            pool: draft KV pool.
            features: features [T, H] beside the tokens, of any floating dtype.

        Returns:
            Logits [R, V] and the next features [T, H], both float32.

        Raises:
            ValueError: `features` has another shape.
        """
        expected = (forward_batch.num_rows, self.decoder.record.hidden)
        if features.shape != expected:
            raise ValueError(f"features have shape {list(features.shape)}, expected {list(expected)}")
        logits, next_features = self.decoder.run(
            forward_batch, pool, (self.feature_layer,), features.float().contiguous()
        )
        assert next_features is not None
        return logits, next_features


def _pack_lm_head(lm_head: Tensor, arena: Arena) -> PackedWeight:
    return PackedWeight.pack(lm_head, None, arena)


def _make_rotary_tables(rotary: RotaryEmbedding) -> RotaryTables:
    def table(positions: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cos, sin = rotary(torch.arange(positions)[None], torch.float32)
        return take_first_half(cos[0]), take_first_half(sin[0])

    return RotaryTables(table)
