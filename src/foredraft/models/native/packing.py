"""Packing of a decoder's modules into native records."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.records import ExpertsRecord, LayerRecord, MixerRecord, WeightRecord
from foredraft.kernels.linear import PackedWeight
from foredraft.models.grid_linear import GridLinear, pack_joined
from foredraft.models.native.family import LLAMA, DecoderFamily
from foredraft.models.recurrent.mixer_families import find_mixer_family

LANES = 16  # numbers in a native vector; the width of a head must be a multiple

CLAMPED = 4  # activation of experts, as in foredraft.h
# Code of the native library by transformers' name of the activation.
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1}

PackWeight = Callable[[Tensor, Tensor | None, Arena], PackedWeight]
JoinMatrices = Callable[[Sequence[Tensor]], Tensor]


@dataclass
class DecoderPacker:
    """Packs a model module by module. Its lists keep the memory alive to which the records point."""

    pack: PackWeight
    is_owned: bool  # whether to free each weight after it is packed
    arena: Arena = field(default_factory=Arena)
    weights: list[PackedWeight] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def build_layer(
        self,
        block: Any,
        sliding_window: int | None,
        family: DecoderFamily = LLAMA,
        rotary: int = 0,
        config: Any = None,
    ) -> LayerRecord:
        """Pack a layer.

        Args:
            block: layer.
            sliding_window: maximum number of positions that a row sees; None = all.
            family: names of its modules. Default Llama's, of which draft layers may lack the first norm.
            rotary: number of rotated values of a head, for a family that rotates adjacent ones. Default 0 = none.
            config: text config, for a family with experts. Default None.
        """
        norms, routed, mixer = family.norms, family.find_experts(block), family.find_mixer(block)
        record = LayerRecord(
            attention_norm=self.hold_norm(getattr(block, norms.attention, None), norms.offset),
            mlp_norm=self.hold_norm(getattr(block, norms.mlp, None), norms.offset),
            attention_post_norm=self.hold_norm(getattr(block, norms.attention_post, None), norms.offset),
            mlp_post_norm=self.hold_norm(getattr(block, norms.mlp_post, None), norms.offset),
            sliding_window=sliding_window or 0,
        )
        if mixer is None:
            self._set_attention(record, block.self_attn, family, rotary)
        else:
            record.mixer = ctypes.pointer(self._build_mixer(mixer))
        if routed is not None and family.experts is not None:
            record.experts = ctypes.pointer(self._build_experts(routed, family, config))
        if (mlp := family.find_mlp(block)) is not None:
            record.gate_up = self.pack_interleaved(*family.list_gate_up(mlp))
            record.down = self.pack_stacked(getattr(mlp, family.down))
        if (gate := family.find_shared_gate(block)) is not None:
            record.shared_gate = self.hold_float(gate.weight[0])
        return record

    def _set_attention(self, record: LayerRecord, attention: Any, family: DecoderFamily, rotary: int) -> None:
        """Set the fields of a layer that only attention has."""
        norms = family.norms
        record.q_norm = self.hold_norm(getattr(attention, norms.query, None), norms.offset)
        record.k_norm = self.hold_norm(getattr(attention, norms.key, None), norms.offset)
        record.qkv = self._pack_qkv(attention, family, rotary)
        record.out = self.pack_stacked(getattr(attention, family.out))
        record.positions = family.positions(attention)
        if "sinks" in dict(attention.named_parameters()):
            record.sinks = self.hold_float(attention.sinks)

    def _may_round(self, linears: Sequence[Any]) -> bool:
        """Return whether the packed matrices may have other values than the modules."""
        return self.pack != PackedWeight.pack or any(type(linear) is GridLinear for linear in linears)

    def _build_mixer(self, mixer: Any) -> MixerRecord:
        """Pack the recurrent part of a layer."""
        family = find_mixer_family(mixer)
        assert family is not None, "explain_unsupported was not called"
        record = family.build(mixer, self.hold_float)
        inputs, order = [getattr(mixer, name) for name in family.inputs], family.order(mixer)
        num_large = len(inputs) - family.num_small
        if family.num_small and self._may_round(inputs):
            num_rows = sum(linear.out_features for linear in inputs[:num_large])
            large, small = (None, None) if order is None else (order[:num_rows], order[num_rows:] - num_rows)
            record.input = self._pack_joined(_make_ordered_join(large), inputs[:num_large])
            rows = _make_ordered_join(small)([linear.weight.detach() for linear in inputs[num_large:]])
            record.steps = self.hold_weight(PackedWeight.pack(rows, None, self.arena))
        else:
            record.input = self._pack_joined(_make_ordered_join(order), inputs)
        record.out = self.pack_stacked(getattr(mixer, family.output))
        return record

    def _build_experts(self, routed: Any, family: DecoderFamily, config: Any) -> ExpertsRecord:
        """Pack a router, which is never quantised, and its experts."""
        names = family.experts
        assert names is not None
        router, experts = dict(getattr(routed, names.router).named_parameters()), routed.experts
        gate_up = self._pack_each(_interleave_pairs if names.has_pairs else _interleave_halves, experts, "gate_up_proj")
        down = self._pack_each(_transpose if names.has_pairs else _stack_rows, experts, "down_proj")
        return ExpertsRecord(
            count=len(gate_up),
            per_token=getattr(config, names.num_chosen),
            inner=gate_up[0].n // 2,
            activation=CLAMPED if names.is_clamped else ACTIVATIONS[family.read_activation(config)],
            alpha=config.swiglu_alpha if names.is_clamped else 0.0,
            limit=config.swiglu_limit if names.is_clamped else 0.0,
            is_normalised=names.is_normalised(config),
            router=self.hold_weight(PackedWeight.pack(router["weight"], router.get("bias"), self.arena)),
            gate_up=ctypes.cast(gate_up, ctypes.POINTER(WeightRecord)),
            down=ctypes.cast(down, ctypes.POINTER(WeightRecord)),
        )

    def _pack_each(self, join: JoinMatrices, experts: Any, name: str) -> Any:
        """Pack the matrices of a tensor with one for each expert. Returns an array of their records."""
        matrices = getattr(experts, name).detach()
        biases = dict(experts.named_parameters()).get(f"{name}_bias")
        packed = [
            self.pack(join([matrix]), None if biases is None else join([biases[i].detach()[None]])[:, 0], self.arena)
            for i, matrix in enumerate(matrices)
        ]
        if self.is_owned:
            setattr(experts, name, nn.Parameter(matrices.new_empty(0), requires_grad=False))
        return (WeightRecord * len(packed))(*map(self.hold_weight, packed))

    def _pack_qkv(self, attention: Any, family: DecoderFamily, rotary: int) -> WeightRecord:
        linears = [getattr(attention, name) for name in family.qkv]
        return self._pack_joined(_make_qkv_join(attention, family, rotary), linears)

    def pack_stacked(self, *linears: Any) -> WeightRecord:
        """Pack linear modules as one matrix with their outputs concatenated."""
        return self._pack_joined(_stack_rows, linears)

    def pack_interleaved(self, *linears: Any) -> WeightRecord:
        """Pack two linear modules, or one with both outputs, with the outputs interleaved; see `interleave_rows`."""
        return self._pack_joined(_choose_gate_up_join(linears), linears)

    def _pack_joined(self, join: JoinMatrices, linears: Sequence[Any]) -> WeightRecord:
        bias = None
        if any(linear.bias is not None for linear in linears):
            rows = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias.detach() for x in linears]
            bias = join([row[:, None] for row in rows])[:, 0]
        packed = pack_joined(linears, join, self.pack, bias, self.arena, self.is_owned)
        if self.is_owned:
            for linear in linears:
                linear.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        return self.hold_weight(packed)

    def hold_weight(self, weight: PackedWeight) -> WeightRecord:
        """Keep a packed weight alive and return its record."""
        self.weights.append(weight)
        return weight.record

    def hold_norm(self, module: Any, offset: float = 0.0) -> int | None:
        """Convert a norm's weight to float32, keep it alive and return its address; None without a norm.

        Args:
            module: norm, or None.
            offset: number that the norm adds to its weight. Default 0.
        """
        if module is None:
            return None
        return self.hold_float(module.weight.float() + offset if offset else module.weight)

    def hold_float(self, parameter: Tensor) -> int:
        """Convert a tensor to float32, keep it alive and return its address."""
        return self.hold_tensor(parameter.float())

    def hold_tensor(self, parameter: Tensor) -> int:
        """Keep a tensor alive and return its address."""
        self.tensors.append(parameter.detach().contiguous())
        return self.tensors[-1].data_ptr()


Product = tuple[str, list[Any], JoinMatrices]  # name of a product, its linear modules, and how their rows are joined


def list_products(block: Any, family: DecoderFamily, rotary: int) -> list[Product]:
    """List the products of a layer with linear modules, by the names of `kernels.cpu.records.PRODUCTS`.

    Args:
        block: layer.
        family: names of its modules.
        rotary: number of rotated values of a head.
    """
    attention = block.self_attn
    qkv = [getattr(attention, name) for name in family.qkv]
    products: list[Product] = [
        ("qkv", qkv, _make_qkv_join(attention, family, rotary)),
        ("out", [getattr(attention, family.out)], _stack_rows),
    ]
    if family.find_experts(block) is None:
        mlp = family.find_mlp(block)
        gate_up, down = family.list_gate_up(mlp), getattr(mlp, family.down)
        products += [("gate_up", gate_up, _choose_gate_up_join(gate_up)), ("down", [down], _stack_rows)]
    return products


def _make_qkv_join(attention: Any, family: DecoderFamily, rotary: int) -> JoinMatrices:
    if family.has_gate:
        return _make_gated_join(attention.head_dim)
    if not family.has_interleaved_rotary:
        return _stack_rows
    head_dim = attention.head_dim

    def join(matrices: Sequence[Tensor]) -> Tensor:
        query, key, value = matrices
        return torch.cat([_split_pairs(query, head_dim, rotary), _split_pairs(key, head_dim, rotary), value])

    return join


def _make_ordered_join(order: Tensor | None) -> JoinMatrices:
    """Join matrices and put their rows into an order; None = as they are."""
    return _stack_rows if order is None else lambda matrices: torch.cat(list(matrices))[order]


def _make_gated_join(head_dim: int) -> JoinMatrices:
    """Move the gates of all heads, each stored after the head's query, behind the values."""

    def join(matrices: Sequence[Tensor]) -> Tensor:
        pairs, key, value = matrices
        query, gate = pairs.view(-1, 2, head_dim, pairs.shape[1]).unbind(1)
        return torch.cat([query.flatten(0, 1), key, value, gate.flatten(0, 1)])

    return join


def _choose_gate_up_join(linears: Sequence[Any]) -> JoinMatrices:
    return interleave_rows if len(linears) == 2 else _interleave_halves


def _stack_rows(blocks: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(blocks))


def interleave_rows(pair: Sequence[Tensor]) -> Tensor:
    """Interleave two matrices in blocks of 16 rows. Rows of zeros fill the last blocks."""
    missing = -len(pair[0]) % LANES
    padded = [torch.cat([half, half.new_zeros(missing, half.shape[1])]).view(-1, LANES, half.shape[1]) for half in pair]
    return torch.stack(padded, 1).flatten(0, 2)


def _split_pairs(rows: Tensor, head_dim: int, rotary: int) -> Tensor:
    """Move the first of every pair of rotated rows to the first half of them, and the second to the second half.

    Scores are sums over a head, so the same order in queries and keys changes nothing but rounding.
    """
    order = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, head_dim)]
    return rows.view(-1, head_dim, rows.shape[1])[:, order].flatten(0, 1)


def _interleave_halves(matrices: Sequence[Tensor]) -> Tensor:
    (both,) = matrices
    return interleave_rows(both.chunk(2))


def _interleave_pairs(matrices: Sequence[Tensor]) -> Tensor:
    """Interleave the columns of one matrix [k, 2 * n], of which every second one is a gate."""
    (both,) = matrices
    return interleave_rows([both[:, ::2].T, both[:, 1::2].T])


def _transpose(matrices: Sequence[Tensor]) -> Tensor:
    (matrix,) = matrices
    return matrix.T
