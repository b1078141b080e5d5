"""Decoders that run as one native call per pass: Llama and what shares its structure, on CPU.

Weights are packed once, query, key and value together and gate and up interleaved; a pass then enters a team of threads
once and stays in it from the embeddings to the logits. What is not recognised keeps the plain path.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import (
    LayerRecord,
    ModelRecord,
    NativeLibrary,
    PassRecord,
    WeightRecord,
    load_library,
)
from foredraft.kernels.linear import PackedWeight
from foredraft.kv.pool import KVPool
from foredraft.models.forward_batch import ForwardBatch

FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "granite")  # by config.model_type
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1}
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # factors that do not depend on the text's length
LANES = 16  # head widths come in whole vectors

PackWeight = Callable[[Tensor, Tensor | None, Arena], PackedWeight]
RotaryTable = Callable[[int], tuple[Tensor, Tensor]]  # positions -> cos and sin [positions, rotary / 2]


def get_obstacle(model: Any) -> str | None:
    """Why a model keeps the plain path; None if it can run fused."""
    config = model.config.get_text_config()
    if model.device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float32):
        return f"{model.dtype} on {model.device.type}"
    if config.model_type not in FAMILIES:
        return f"models of type {config.model_type}"
    if config is not model.config:  # its layers lie deeper, beside those for images
        return f"the text part of a model of type {model.config.model_type}"
    if config.hidden_act not in ACTIVATIONS:
        return f"the activation {config.hidden_act}"
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") not in STATIC_ROPE:
        return "rotary factors that change with the text"
    blocks = model.model.layers
    linears = [m for block in blocks for m in list_projections(block)]
    if not all(type(m) is nn.Linear for m in [*linears, model.lm_head]):
        return "linear layers that were replaced"
    if type(model.model.embed_tokens) is not nn.Embedding:
        return "embeddings that were replaced"
    if blocks[0].self_attn.head_dim % LANES:
        return f"heads of width {blocks[0].self_attn.head_dim}"
    if load_library() is None:
        return "no native kernels"
    return None


def list_projections(block: Any) -> list[Any]:
    attention, mlp = block.self_attn, block.mlp
    return [
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    ]


@dataclass(frozen=True)
class LayerSlice:
    """The first layers of a decoder, then its own norm and head."""

    num_layers: int
    adapter: LayerRecord | None = None  # of whose MLP alone runs before the norm

    def apply_to(self, record: ModelRecord) -> ModelRecord:
        """The record cut short; it points where the whole one does."""
        cut = ModelRecord.from_buffer_copy(record)
        cut.layers = self.num_layers
        if self.adapter is not None:
            cut.adapter = ctypes.pointer(self.adapter)
        return cut


@dataclass
class NativeDecoder:
    """The native side's view of a model. Thread-safe: a pass brings its own scratch memory."""

    native: NativeLibrary
    record: ModelRecord
    weights: list[PackedWeight]  # the head's comes last
    tensors: list[Tensor]  # whatever else the record points to
    kv_samples: list[Tensor]  # [0, H, D] of every layer, for its KV pool
    dtype: torch.dtype
    vocab_size: int  # of the tokens it reads
    rotary_table: RotaryTable
    num_positions: int = 0
    _free_scratch: list[Tensor] = field(default_factory=list)
    _rotary_lock: Lock = field(default_factory=Lock)

    @classmethod
    def from_model(
        cls, model: Any, sliding_windows: Sequence[int | None], pack: PackWeight, pack_head: PackWeight, is_owned: bool
    ) -> "NativeDecoder":
        """Pack a model for which `why_not` is None. One that is ours gives up each weight as it is packed."""
        packing = DecoderPacker(pack, is_owned)
        record = _build_record(model, sliding_windows, packing, pack_head)
        vocabulary = len(model.model.embed_tokens.weight)
        return cls.from_record(record, packing, model.dtype, vocabulary, _make_rotary_table(model.model.rotary_emb))

    @classmethod
    def from_record(
        cls,
        record: ModelRecord,
        packer: "DecoderPacker",
        dtype: torch.dtype,
        vocab_size: int,
        rotary_table: RotaryTable,
    ) -> "NativeDecoder":
        """`dtype`: of keys and values, as the record has it."""
        native = load_library()
        assert native is not None, "why_not was not asked"
        samples = [torch.empty(0, record.kv_heads, record.head_dim, dtype=dtype)] * record.layers
        return cls(native, record, packer.weights, packer.tensors, samples, dtype, vocab_size, rotary_table)

    @property
    def head(self) -> PackedWeight:
        """For drafters to share."""
        return self.weights[-1]

    def forward(
        self, forward_batch: ForwardBatch, pool: KVPool, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] in float32, and the tapped states [T, F] in the model's type."""
        logits, features = self.run(forward_batch, pool, hidden_layers)
        return logits, None if features is None else features.to(self.dtype)

    def run(
        self,
        forward_batch: ForwardBatch,
        pool: KVPool,
        hidden_layers: tuple[int, ...],
        inputs: Tensor | None = None,
        layer_slice: LayerSlice | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] and the tapped states [T, F], both in float32. `inputs` [T, H] float32: for a model that begins
        with more than tokens. `part`: not all of its layers; taps lie within them."""
        rows = forward_batch.packed_rows
        self._check_tokens(forward_batch)
        self._extend_rotary(rows.record.longest)
        pool.reserve(self.kv_samples, forward_batch.num_slots)
        logits = torch.empty(rows.num_logits, self.record.head.n)
        features = torch.empty(rows.num_rows, len(hidden_layers) * self.record.hidden) if hidden_layers else None
        self.native.sync_threads()
        record = self.record if layer_slice is None else layer_slice.apply_to(self.record)
        scratch = self._take_scratch(self.native.handle.fd_scratch(record, rows.record))
        keys, values = pool.addresses
        boundaries = (ctypes.c_int32 * len(hidden_layers))(*hidden_layers)
        job = PassRecord(
            ctypes.addressof(keys),
            ctypes.addressof(values),
            ctypes.addressof(boundaries),
            len(hidden_layers),
            None if inputs is None else inputs.data_ptr(),
            None if features is None else features.data_ptr(),
            logits.data_ptr(),
            scratch.data_ptr(),
        )
        self.native.handle.fd_forward(record, rows.record, job)
        self._free_scratch.append(scratch)
        return logits, features

    def _check_tokens(self, forward_batch: ForwardBatch) -> None:
        """Refuse what torch would refuse: a draft's vocabulary may be the narrower one."""
        if not all(min(span.tokens) >= 0 and max(span.tokens) < self.vocab_size for span in forward_batch.spans):
            raise IndexError(f"a token id is outside the vocabulary of {self.vocab_size} tokens")

    def _take_scratch(self, size: int) -> Tensor:
        try:
            held = self._free_scratch.pop()
        except IndexError:
            return torch.empty(size, dtype=torch.uint8)
        return held if len(held) >= size else torch.empty(2 * size, dtype=torch.uint8)

    def _extend_rotary(self, num_positions: int) -> None:
        if num_positions <= self.num_positions:
            return
        with self._rotary_lock:
            if num_positions <= self.num_positions:  # another pass was first
                return
            size = max(1024, 1 << (num_positions - 1).bit_length())
            cos, sin = self.rotary_table(size)
            self.tensors += [cos, sin]  # a pass under way may still read the old ones
            self.record.cos, self.record.sin = cos.data_ptr(), sin.data_ptr()
            self.num_positions = size


def _make_rotary_table(module: Any) -> RotaryTable:
    def table(positions: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cos, sin = module(torch.empty(0), position_ids=torch.arange(positions)[None])
        return take_first_half(cos[0]), take_first_half(sin[0])

    return table


def take_first_half(factors: Tensor) -> Tensor:
    """[positions, rotary] -> the first half of every row: the second is the same again."""
    return factors[:, : factors.shape[-1] // 2].contiguous()


def _build_record(
    source: Any, sliding_windows: Sequence[int | None], packer: "DecoderPacker", pack_head: PackWeight
) -> ModelRecord:
    config = source.config.get_text_config()
    blocks = zip(source.model.layers, sliding_windows, strict=True)
    layers = (LayerRecord * len(sliding_windows))(*(packer.build_layer(block, reach) for block, reach in blocks))
    attention, norm = source.model.layers[0].self_attn, source.model.norm
    embedding = source.model.embed_tokens.weight
    return ModelRecord(
        layers=len(layers),
        hidden=embedding.shape[1],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        rotary=2 * len(source.model.rotary_emb.inv_freq),
        inner=layers[0].gate_up.n // 2,
        activation=ACTIVATIONS[config.hidden_act],
        has_bf16_kv=source.dtype == torch.bfloat16,
        has_bf16_embedding=embedding.dtype == torch.bfloat16,
        eps=norm.variance_epsilon,
        scale=attention.scaling,
        softcap=0.0,
        embedding_scale=getattr(config, "embedding_multiplier", 1.0),
        residual_scale=getattr(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / getattr(config, "logits_scaling", 1.0),
        embedding=packer.hold_tensor(embedding),
        norm=packer.hold_norm(norm),
        layer=ctypes.cast(layers, ctypes.POINTER(LayerRecord)),
        head=packer.hold_weight(pack_head(source.lm_head.weight, source.lm_head.bias, packer.arena)),
    )


@dataclass
class DecoderPacker:
    """Packs a model module by module and keeps alive what the records point to."""

    pack: PackWeight
    is_owned: bool  # so that a weight can go once it is packed
    arena: Arena = field(default_factory=Arena)
    weights: list[PackedWeight] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def build_layer(self, block: Any, sliding_window: int | None) -> LayerRecord:
        attention, mlp = block.self_attn, block.mlp
        return LayerRecord(
            attention_norm=self.hold_norm(getattr(block, "input_layernorm", None)),
            mlp_norm=self.hold_norm(block.post_attention_layernorm),
            q_norm=self.hold_norm(getattr(attention, "q_norm", None)),
            k_norm=self.hold_norm(getattr(attention, "k_norm", None)),
            qkv=self.pack_stacked(attention.q_proj, attention.k_proj, attention.v_proj),
            out=self.pack_stacked(attention.o_proj),
            gate_up=self.pack_interleaved(mlp.gate_proj, mlp.up_proj),
            down=self.pack_stacked(mlp.down_proj),
            sliding=sliding_window or 0,
        )

    def pack_stacked(self, *linears: Any) -> WeightRecord:
        return self._pack_joined(_stack_rows, linears)

    def pack_interleaved(self, *linears: Any) -> WeightRecord:
        return self._pack_joined(interleave_rows, linears)

    def _pack_joined(self, join: Callable[[Sequence[Tensor]], Tensor], linears: Sequence[Any]) -> WeightRecord:
        bias = None
        if any(linear.bias is not None for linear in linears):
            rows = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears]
            bias = join([row[:, None] for row in rows])[:, 0]
        packed = self.pack(join([linear.weight.detach() for linear in linears]), bias, self.arena)
        if self.is_owned:
            for linear in linears:
                linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        return self.hold_weight(packed)

    def hold_weight(self, weight: PackedWeight) -> WeightRecord:
        self.weights.append(weight)
        return weight.record

    def hold_norm(self, module: Any) -> int | None:
        """Its weight in float32; None for no norm."""
        return None if module is None else self.hold_tensor(module.weight.float())

    def hold_tensor(self, parameter: Tensor) -> int:
        self.tensors.append(parameter.detach().contiguous())
        return self.tensors[-1].data_ptr()


def _stack_rows(blocks: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(blocks))


def interleave_rows(pair: Sequence[Tensor]) -> Tensor:
    """16 rows of gate, 16 rows of up, and so on; rows of zeros fill the last."""
    missing = -len(pair[0]) % LANES
    padded = [torch.cat([half, half.new_zeros(missing, half.shape[1])]).view(-1, LANES, half.shape[1]) for half in pair]
    return torch.stack(padded, 1).flatten(0, 2)
