"""Packing of a decoder's modules into native records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.kernels.arena import Arena
from foredraft.kernels.cpu.library import LayerRecord, WeightRecord
from foredraft.kernels.linear import PackedWeight
from foredraft.models.grid_linear import pack_joined
from foredraft.models.native.family import LLAMA, DecoderFamily

LANES = 16  # numbers in a native vector; the width of a head must be a multiple

PackWeight = Callable[[Tensor, Tensor | None, Arena], PackedWeight]


@dataclass
class DecoderPacker:
    """Packs a model module by module. Its lists keep the memory alive to which the records point."""

    pack: PackWeight
    is_owned: bool  # whether to free each weight after it is packed
    arena: Arena = field(default_factory=Arena)
    weights: list[PackedWeight] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def build_layer(
        self, block: Any, sliding_window: int | None, family: DecoderFamily = LLAMA, rotary: int = 0
    ) -> LayerRecord:
        """Pack a layer.

        Args:
            block: layer.
            sliding_window: maximum number of positions that a row sees; None = all.
            family: names of its modules. Default Llama's, of which draft layers may lack the first norm.
            rotary: number of rotated values of a head, for a family that rotates adjacent ones. Default 0 = none.
        """
        attention, mlp, norms = block.self_attn, block.mlp, family.norms
        return LayerRecord(
            attention_norm=self.hold_norm(getattr(block, norms.attention, None), norms.offset),
            mlp_norm=self.hold_norm(getattr(block, norms.mlp, None), norms.offset),
            q_norm=self.hold_norm(getattr(attention, "q_norm", None), norms.offset),
            k_norm=self.hold_norm(getattr(attention, "k_norm", None), norms.offset),
            attention_post_norm=self.hold_norm(getattr(block, norms.attention_post, None), norms.offset),
            mlp_post_norm=self.hold_norm(getattr(block, norms.mlp_post, None), norms.offset),
            qkv=self._pack_qkv(attention, family, rotary),
            out=self.pack_stacked(attention.o_proj),
            gate_up=self.pack_interleaved(*(getattr(mlp, name) for name in family.gate_up)),
            down=self.pack_stacked(mlp.down_proj),
            sliding_window=sliding_window or 0,
            positions=family.positions(attention),
        )

    def _pack_qkv(self, attention: Any, family: DecoderFamily, rotary: int) -> WeightRecord:
        linears = [getattr(attention, name) for name in family.qkv]
        if not family.has_interleaved_rotary:
            return self.pack_stacked(*linears)
        head_dim = attention.head_dim

        def join(matrices: Sequence[Tensor]) -> Tensor:
            query, key, value = matrices
            return torch.cat([_split_pairs(query, head_dim, rotary), _split_pairs(key, head_dim, rotary), value])

        return self._pack_joined(join, linears)

    def pack_stacked(self, *linears: Any) -> WeightRecord:
        """Pack linear modules as one matrix with their outputs concatenated."""
        return self._pack_joined(_stack_rows, linears)

    def pack_interleaved(self, *linears: Any) -> WeightRecord:
        """Pack two linear modules, or one with both outputs, with the outputs interleaved; see `interleave_rows`."""
        return self._pack_joined(interleave_rows if len(linears) == 2 else _interleave_halves, linears)

    def _pack_joined(self, join: Callable[[Sequence[Tensor]], Tensor], linears: Sequence[Any]) -> WeightRecord:
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
        return self.hold_tensor(module.weight.float() + offset if offset else module.weight.float())

    def hold_tensor(self, parameter: Tensor) -> int:
        """Keep a tensor alive and return its address."""
        self.tensors.append(parameter.detach().contiguous())
        return self.tensors[-1].data_ptr()


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
