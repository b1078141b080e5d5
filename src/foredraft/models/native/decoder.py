"""Decoders that run as one native call per forward pass on CPU: Llama and the families of `family.py`.

Weights are packed once: query, key and value in one matrix, gate and up interleaved. A forward pass enters the thread
team once, from the embeddings to the logits. Other models run transformers' modules.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.kernels.cpu.library import NativeLibrary, load_library
from foredraft.kernels.cpu.records import KV_KINDS, LayerRecord, ModelRecord, PassRecord
from foredraft.kernels.image_rows import NativeImageRows
from foredraft.kernels.linear import PackedWeight
from foredraft.kernels.mixers import MixerKernel, NativeRuns
from foredraft.kernels.scratch import ScratchPool
from foredraft.kernels.tuning import tune_products
from foredraft.kv.int8_rows import SCALE_BYTES
from foredraft.kv.pool import KVPool
from foredraft.kv.state_pool import StateKey, StateShape
from foredraft.models.forward_batch import ForwardBatch
from foredraft.models.grid_linear import GridLinear, pack_joined, take_only
from foredraft.models.native.causal_stack import CausalStack, explain_missing_stack
from foredraft.models.native.family import FAMILIES, DecoderFamily
from foredraft.models.native.packing import ACTIVATIONS, LANES, DecoderPacker, PackWeight
from foredraft.models.native.rotary import RotaryTables
from foredraft.models.recurrent.mixer_families import find_mixer_family, list_projection_names
from foredraft.models.recurrent.native_mixer import list_state_shapes
from foredraft.models.recurrent.runs import plan_runs

STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # rope types whose factors do not depend on the sequence length
MIN_ROTARY_POSITIONS = 1024  # positions of the first rotary table


def explain_unsupported(model: Any) -> str | None:
    """Return the reason why a model cannot run as native code; None if it can."""
    config = model.config.get_text_config()
    if model.device.type != "cpu" or model.dtype not in (torch.bfloat16, torch.float32):
        return f"{model.dtype} on {model.device.type}"
    if (family := FAMILIES.get(config.model_type)) is None:
        return f"models of type {config.model_type}"
    if (activation := family.read_activation(config)) not in ACTIVATIONS:
        return f"the activation {activation}"
    if not set(family.list_rope_types(config)) <= set(STATIC_ROPE):
        return "rotary factors that change with the sequence length"
    if (reason := explain_missing_stack(model)) is not None:
        return reason
    stack = CausalStack.from_model(model)
    blocks = stack.decoder.layers
    mixers = [mixer for block in blocks if (mixer := family.find_mixer(block)) is not None]
    attending = [block.self_attn for block in blocks if family.find_mixer(block) is None]
    if not attending or not all(attention.is_causal for attention in attending):
        return "attention to later tokens" if attending else "layers without attention alone"
    if any(getattr(config, name) is not None for name in family.unset_options):
        return f"the options {', '.join(family.unset_options)}"
    if not all(_has_own_experts(family, block) for block in blocks):
        return "experts that were replaced"
    if not all(find_mixer_family(mixer) for mixer in mixers):
        return "recurrent layers with other options"
    linears = [m for block in blocks for m in family.list_projections(block)]
    linears += [getattr(m, name) for m in mixers for name in list_projection_names(m)]
    if not all(type(m) in (nn.Linear, GridLinear) for m in [*linears, stack.head]):
        return "linear layers that were replaced"
    if not family.is_own_embedding(stack.decoder.embed_tokens, stack.decoder):
        return "embeddings that were replaced"
    if attending[0].head_dim % LANES:
        return f"heads of width {attending[0].head_dim}"
    if load_library() is None:
        return "no native kernels"
    return None


def _has_own_experts(family: DecoderFamily, block: Any) -> bool:
    """Return whether the experts of a layer are its family's, with plain tensors as weights."""
    if (routed := family.find_experts(block)) is None:
        return True
    weights = [*routed.experts.parameters()]
    is_own = type(routed.experts).__module__ == type(block).__module__
    return is_own and all(type(weight) is nn.Parameter and weight.is_floating_point() for weight in weights)


@dataclass(frozen=True)
class LayerSlice:
    """First layers of a decoder, followed by an adapter, the final norm and the head."""

    num_layers: int
    adapter: LayerRecord | None = None  # only its MLP runs; None = no adapter

    def apply_to(self, record: ModelRecord) -> ModelRecord:
        """Copy a record with fewer layers. The copy points to the memory of the original."""
        shortened = ModelRecord.from_buffer_copy(record)
        shortened.layers = self.num_layers
        if self.adapter is not None:
            shortened.adapter = ctypes.pointer(self.adapter)
        return shortened


@dataclass
class NativeDecoder:
    """Model in the native layout. Thread-safe: every pass has its own scratch memory."""

    native: NativeLibrary
    record: ModelRecord
    weights: list[PackedWeight]  # keeps the record's weights alive; the last one is the head
    tensors: list[Tensor]  # keeps the other memory of the record alive
    kv_samples: list[Tensor]  # by layer: [0, H, D] shape and dtype of keys and values
    dtype: torch.dtype  # of the model's weights and hidden states
    vocab_size: int  # number of input tokens
    rotary_tables: RotaryTables
    num_positions: int = 0  # positions in the record's rotary table
    owner: ModelRecord | None = None  # keeps the layers alive to which a copied record points
    scratch: ScratchPool = field(default_factory=ScratchPool)
    _rotary_lock: Lock = field(default_factory=Lock)

    @classmethod
    def from_model(
        cls, model: Any, sliding_windows: Sequence[int | None], pack: PackWeight, pack_head: PackWeight, is_owned: bool
    ) -> "NativeDecoder":
        """Pack a model for which `explain_unsupported` returned None.

        Args:
            model: transformers model.
            sliding_windows: by layer, maximum number of positions that a row sees; None = all.
            pack: packs a matrix.
            pack_head: packs the matrix of the head.
            is_owned: whether to free each weight after it is packed.
        """
        packer, decoder = DecoderPacker(pack, is_owned), CausalStack.from_model(model).decoder
        rotary_tables = FAMILIES[model.config.get_text_config().model_type].make_rotary_tables(decoder.rotary_emb)
        record = _build_record(model, sliding_windows, packer, pack_head, rotary_tables.width)
        return cls.from_record(record, packer, model.dtype, len(decoder.embed_tokens.weight), rotary_tables)

    @classmethod
    def from_record(
        cls,
        record: ModelRecord,
        packer: DecoderPacker,
        dtype: torch.dtype,
        vocab_size: int,
        rotary_tables: RotaryTables,
    ) -> "NativeDecoder":
        """Build a decoder from a record.

        Args:
            record: native record.
            packer: owner of the memory to which the record points.
            dtype: dtype of keys and values, equal to the record's.
            vocab_size: number of input tokens.
            rotary_tables: rotary factors.
        """
        native = load_library()
        assert native is not None, "explain_unsupported was not called"
        tune_products(native, sum(weight.data.nbytes for weight in packer.weights))
        samples = [torch.empty(0, heads, record.head_dim, dtype=dtype) for heads in _list_kv_heads(record)]
        return cls(native, record, packer.weights, packer.tensors, samples, dtype, vocab_size, rotary_tables)

    @cached_property
    def state_shapes(self) -> dict[StateKey, StateShape]:
        """Shapes of the states of the recurrent layers. Cached, since reading a record is slow."""
        shapes: dict[StateKey, StateShape] = {}
        for layer in range(self.record.layers):
            if self.record.layer[layer].mixer:
                shapes |= list_state_shapes(layer, MixerKernel(self.record.layer[layer].mixer.contents, ()))
        return shapes

    @property
    def head(self) -> PackedWeight:
        """Packed head, which drafters may share."""
        return self.weights[-1]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token."""
        return sum(2 * sample.shape[1] * sample.shape[2] * sample.element_size() for sample in self.kv_samples)

    def with_int8_kv(self) -> "NativeDecoder":
        """Return a decoder with the same weights that stores keys and values in int8, with a scale per head."""
        record = ModelRecord.from_buffer_copy(self.record)
        record.kv_kind = KV_KINDS[torch.int8]
        width = record.head_dim + SCALE_BYTES
        samples = [torch.empty(0, heads, width, dtype=torch.int8) for heads in _list_kv_heads(record)]
        return replace(
            self, record=record, kv_samples=samples, num_positions=0, owner=self.record, scratch=ScratchPool(),
            _rotary_lock=Lock(),
        )  # fmt: skip

    def forward(
        self, forward_batch: ForwardBatch, pool: KVPool, hidden_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Run one forward pass; see LM.forward. Logits are float32, hidden states have the model's dtype."""
        return self.run(forward_batch, pool, hidden_layers, feature_dtype=self.dtype)

    def run(
        self,
        forward_batch: ForwardBatch,
        pool: KVPool,
        hidden_layers: tuple[int, ...],
        inputs: Tensor | None = None,
        layer_slice: LayerSlice | None = None,
        feature_dtype: torch.dtype = torch.float32,
        ahead: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one forward pass.

        Args:
            forward_batch: T packed rows.
            pool: KV pool.
            hidden_layers: layer boundaries to return, within the slice.
            inputs: features [T, H], float32, for a model that reads them beside the tokens. Default None.
            layer_slice: layers to run. Default None = all.
            feature_dtype: dtype of the hidden states, float32 (default) or bfloat16.
            ahead: [T] rows after its own, in a chain, that a row sees. Default None = those that images ask for.

        Returns:
            Logits [R, V], float32, and hidden states [T, F] at the boundaries, concatenated, or None.
        """
        if ahead is None:
            rows, images = forward_batch.visible_rows, _pack_images(forward_batch, self.rotary_tables)
        else:
            rows, images = forward_batch.pack_ahead(ahead), NativeImageRows.from_ahead(ahead)
        self.check_tokens(forward_batch)
        self.extend_rotary(rows.record.max_keys)
        pool.reserve(self.kv_samples, forward_batch.num_slots)
        logits = torch.empty(rows.num_logits, self.record.head.n, dtype=torch.float32)
        features = self._allocate_features(forward_batch, len(hidden_layers), feature_dtype)
        self.native.sync_threads()
        record = self.record if layer_slice is None else layer_slice.apply_to(self.record)
        scratch = self.scratch.take(self.native.handle.fd_decoder_scratch(record, rows.record))
        keys, values = pool.addresses
        adapted, runs = forward_batch.adapted_rows, self._plan_runs(forward_batch, pool)
        boundaries = (ctypes.c_int32 * len(hidden_layers))(*hidden_layers)
        job = PassRecord(
            keys=ctypes.addressof(keys),
            values=ctypes.addressof(values),
            hidden_layers=ctypes.addressof(boundaries),
            hidden_layer_count=len(hidden_layers),
            has_bf16_features=feature_dtype == torch.bfloat16,
            reads_logit_rows=not forward_batch.reads_all_states,
            inputs=None if inputs is None else inputs.data_ptr(),
            features=None if features is None else features.data_ptr(),
            logits=logits.data_ptr(),
            scratch=scratch.data_ptr(),
            adapted=None if adapted is None else ctypes.pointer(adapted.record),
            images=None if images is None else ctypes.pointer(images.record),
        )
        if runs is not None and pool.states is not None:
            job.runs = ctypes.pointer(runs.record)
            job.conv_states, job.states = pool.states.list_addresses(self.record.layers)
        self.native.handle.fd_decoder_forward(record, rows.record, job)
        self.scratch.give_back(scratch)
        return logits, features

    def _allocate_features(self, forward_batch: ForwardBatch, num_layers: int, dtype: torch.dtype) -> Tensor | None:
        """Allocate the hidden states [T, F] of a pass; zeros if the pass writes some of them alone."""
        if not num_layers:
            return None
        allocate = torch.empty if forward_batch.reads_all_states else torch.zeros
        return allocate(forward_batch.num_rows, num_layers * self.record.hidden, dtype=dtype)

    def _plan_runs(self, forward_batch: ForwardBatch, pool: KVPool) -> NativeRuns | None:
        """Plan the runs of a pass and allocate their states; None without recurrent layers."""
        if not self.state_shapes:
            return None
        assert pool.states is not None, "the model has recurrent layers, and its pool no states"
        return plan_runs(forward_batch, pool.states).native_runs

    def check_tokens(self, forward_batch: ForwardBatch) -> None:
        """Raise IndexError, as torch does, for token ids that the model does not have.

        The vocabulary of a draft model may be smaller than the target's.
        """
        if not all(min(span.tokens) >= 0 and max(span.tokens) < self.vocab_size for span in forward_batch.spans):
            raise IndexError(f"a token id is outside the vocabulary of {self.vocab_size} tokens")

    def extend_rotary(self, num_positions: int) -> None:
        """Make the rotary table at least `num_positions` long. Sizes are powers of two."""
        if num_positions <= self.num_positions:
            return
        with self._rotary_lock:
            if num_positions <= self.num_positions:  # a concurrent pass has extended the table
                return
            size = max(MIN_ROTARY_POSITIONS, 1 << (num_positions - 1).bit_length())
            main = self.rotary_tables.main(size)
            local = main if self.rotary_tables.local is None else self.rotary_tables.local(size)
            self.tensors += [*main, *local]  # old tables stay, since a concurrent pass may read them
            self.record.cos, self.record.sin = (factors.data_ptr() for factors in main)
            self.record.local_cos, self.record.local_sin = (factors.data_ptr() for factors in local)
            self.num_positions = size


def _pack_images(forward_batch: ForwardBatch, rotary_tables: RotaryTables) -> NativeImageRows | None:
    """Pack the rows of images; None if images change nothing in the pass."""
    images = forward_batch.images
    if images is None:
        return None
    factors = None
    if images.positions is not None:
        assert rotary_tables.mixed is not None, "positions with several axes, and rotary factors of one"
        factors = rotary_tables.mixed(images.positions)
    return NativeImageRows.pack(images.index, images.ahead, images.states, images.layer_states, factors)


def _list_kv_heads(record: ModelRecord) -> list[int]:
    """List the heads of keys and values of every layer; 0 = it is recurrent."""
    return [0 if record.layer[i].mixer else record.kv_heads for i in range(record.layers)]


def _build_record(
    source: Any, sliding_windows: Sequence[int | None], packer: DecoderPacker, pack_head: PackWeight, rotary: int
) -> ModelRecord:
    config, stack = source.config.get_text_config(), CausalStack.from_model(source)
    family, decoder, head = FAMILIES[config.model_type], stack.decoder, stack.head
    blocks = zip(decoder.layers, sliding_windows, strict=True)
    layers = (LayerRecord * len(sliding_windows))(
        *(packer.build_layer(block, sliding_window, family, rotary, config) for block, sliding_window in blocks)
    )
    attention = next(block.self_attn for block in decoder.layers if family.find_mixer(block) is None)
    norm = getattr(decoder, family.norms.final)
    embedding = decoder.embed_tokens.weight
    return ModelRecord(
        layers=len(layers),
        hidden=embedding.shape[1],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        rotary=rotary,
        # Adapters of early exits may be as wide, so a model of experts alone gets a width too.
        inner=max(layer.gate_up.n for layer in layers) // 2 or embedding.shape[1],
        is_parallel=family.norms.are_shared,
        has_joint_head_norm=family.norms.have_joint_heads,
        has_attention_gate=family.has_gate,
        activation=ACTIVATIONS[family.read_activation(config)],
        kv_kind=KV_KINDS[source.dtype],
        has_bf16_embedding=embedding.dtype == torch.bfloat16,
        eps=getattr(norm, family.norms.eps),
        scale=attention.scaling,
        softcap=getattr(config, family.softcap, None) or 0.0,
        logit_softcap=getattr(config, family.logit_softcap, None) or 0.0,
        embedding_scale=family.read_embedding_scale(decoder.embed_tokens, config),
        residual_scale=getattr(config, "residual_multiplier", 1.0),
        logit_scale=getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0),
        norm_bias=packer.hold_tensor(torch.zeros(embedding.shape[1])) if family.norms.are_layer_norms else None,
        embedding=packer.hold_tensor(embedding),
        norm=packer.hold_norm(norm, family.norms.offset),
        layer=ctypes.cast(layers, ctypes.POINTER(LayerRecord)),
        head=packer.hold_weight(pack_joined([head], take_only, pack_head, head.bias, packer.arena, packer.is_owned)),
    )
