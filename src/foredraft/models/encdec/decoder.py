"""Decoder of encoder-decoder models over packed rows: one loop for all families, and the weights in its layout.

A layer has self-attention, cross-attention to the encoder's states, and an MLP. Norms are before each of the three (T5,
mBART, Pegasus, Whisper) or after it (BART, Marian).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PackedWeight
from foredraft.models.forward_batch import AFTER_FINAL_NORM

PackWeight = Callable[[Tensor, Tensor | None, Arena], PackedWeight]
Activation = Callable[[Tensor], Tensor]
# Activations of transformers that torch has as one operator. The results are equal up to rounding.
TORCH_ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


@dataclass(frozen=True)
class Seq2SeqNorm:
    """Norm over the last axis: layer norm with a bias, RMS norm (T5) without one."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def from_module(cls, module: Any) -> "Seq2SeqNorm":
        """Build from a norm module of transformers, sharing its weight."""
        eps = module.eps if isinstance(module, nn.LayerNorm) else module.variance_epsilon
        bias = module.bias.detach() if isinstance(module, nn.LayerNorm) else None
        return cls(module.weight.detach(), bias, float(eps))

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self.eps))
        return self.weight * (wide * scale).to(self.weight.dtype)


class MergedLinear:
    """Linear layer y = x W^T + b of one or several linear modules with the same input; outputs are concatenated.

    Args:
        modules: linear modules.
        is_owned: whether to join the matrices. The modules then become views of the joined matrix, so no weight is
            stored twice.
    """

    def __init__(self, modules: Sequence[nn.Linear], is_owned: bool) -> None:
        self._modules = modules
        has_bias = any(module.bias is not None for module in modules)
        self.bias: Tensor | None = None
        self.weights = [module.weight.detach() for module in modules]
        if has_bias:
            rows = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in modules]
            self.bias = torch.cat(rows)
        if is_owned and len(modules) > 1:
            joined, row = torch.cat(self.weights), 0
            for module in modules:
                module.weight = nn.Parameter(joined[row : row + module.out_features], requires_grad=False)
                row += module.out_features
            self.weights = [joined]

    def __call__(self, x: Tensor) -> Tensor:
        dtype = self.weights[0].dtype  # T5 has one matrix with a wider dtype
        x = x if x.dtype == dtype else x.to(dtype)
        if len(self.weights) == 1:
            return F.linear(x, self.weights[0], self.bias)
        out = torch.cat([F.linear(x, weight) for weight in self.weights], -1)
        return out if self.bias is None else out + self.bias

    @property
    def dense_weight(self) -> Tensor:
        """Joined matrix [outputs, inputs]."""
        return self.weights[0] if len(self.weights) == 1 else torch.cat(self.weights)

    def release(self) -> None:
        """Free the weights. Call this after packing; the modules cannot run afterwards."""
        for module in self._modules:
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        self.weights = []


MergeLinears = Callable[[Sequence[nn.Linear]], MergedLinear]


@dataclass(frozen=True)
class DecoderBlock:
    """One decoder layer."""

    self_norm: Seq2SeqNorm
    qkv: MergedLinear  # query, key and value of self-attention
    self_out: MergedLinear
    cross_norm: Seq2SeqNorm
    cross_query: MergedLinear
    cross_kv: MergedLinear  # keys and values of a source, from the encoder's states
    cross_out: MergedLinear
    mlp_norm: Seq2SeqNorm
    mlp_in: MergedLinear  # gate and value concatenated if the MLP is gated
    mlp_out: MergedLinear


@dataclass(frozen=True)
class DecoderShape:
    """Dimensions and settings that all layers share."""

    heads: int
    head_dim: int
    scale: float  # factor of the products of queries and keys
    is_gated: bool
    is_post_norm: bool
    activation: Activation
    activation_name: str


SelfAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v [T, H, D]) -> [T, H * D]
CrossAttention = Callable[[int, Tensor], Tensor]  # (layer, q [T, H, D]) -> [T, H * D]


@dataclass(frozen=True)
class LMHead:
    """Head: logits [T, V] from states [T, H] after the final norm."""

    linear: MergedLinear
    scale: float = 1.0  # factor of the states
    bias: Tensor | None = None  # [V]

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.linear(x if self.scale == 1.0 else x * self.scale)
        return logits if self.bias is None else logits + self.bias


@dataclass(frozen=True)
class DecoderStack:
    """Decoder of any family. KV caches are behind the attention functions of `forward`."""

    shape: DecoderShape
    embed: Callable[[Tensor, Tensor], Tensor]  # (token ids [T], positions [T]) -> [T, H]
    blocks: tuple[DecoderBlock, ...]
    norm: Seq2SeqNorm | None  # final norm
    head: LMHead
    # Biases [far + 1, H] by distance in tokens, one per layer or one for all layers; None if positions are embedded.
    position_biases: tuple[Tensor, ...] | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend_self: SelfAttention,
        attend_cross: CrossAttention,
        hidden_layers: tuple[int, ...],
        logit_rows: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Run all layers on packed rows.

        Args:
            tokens: token ids [T].
            positions: positions [T].
            attend_self: self-attention, which also stores keys and values.
            attend_cross: cross-attention.
            hidden_layers: layer boundaries to return.
            logit_rows: rows [R] that need logits.

        Returns:
            Logits [R, V], and hidden states [T, F] at the boundaries, concatenated, or None without boundaries.
        """
        x = self.embed(tokens, positions)
        states = {0: x}
        for i, block in enumerate(self.blocks):
            x = self._run_layer(i, block, x, attend_self, attend_cross)
            if i + 1 in hidden_layers:
                states[i + 1] = x
        if AFTER_FINAL_NORM in hidden_layers:
            states[AFTER_FINAL_NORM] = x if self.norm is None else self.norm(x)
        features = torch.cat([states[layer] for layer in hidden_layers], -1) if hidden_layers else None
        last = x.index_select(0, logit_rows)
        return self.head(last if self.norm is None else self.norm(last)), features

    def _run_layer(
        self, i: int, block: DecoderBlock, x: Tensor, attend_self: SelfAttention, attend_cross: CrossAttention
    ) -> Tensor:
        shape = self.shape
        sizes = (3, shape.heads, shape.head_dim)
        if shape.is_post_norm:
            q, k, v = block.qkv(x).view(-1, *sizes).unbind(1)
            x = block.self_norm(x + block.self_out(attend_self(i, q, k, v)))
            query = block.cross_query(x).view(-1, *sizes[1:])
            x = block.cross_norm(x + block.cross_out(attend_cross(i, query)))
            return block.mlp_norm(x + self._run_mlp(block, x))
        q, k, v = block.qkv(block.self_norm(x)).view(-1, *sizes).unbind(1)
        x = x + block.self_out(attend_self(i, q, k, v)).to(x.dtype)
        query = block.cross_query(block.cross_norm(x)).view(-1, *sizes[1:])
        x = x + block.cross_out(attend_cross(i, query)).to(x.dtype)
        return x + self._run_mlp(block, block.mlp_norm(x)).to(x.dtype)

    def _run_mlp(self, block: DecoderBlock, x: Tensor) -> Tensor:
        wide, act = block.mlp_in(x), self.shape.activation
        if self.shape.is_gated:
            gate, value = wide.chunk(2, -1)
            wide = act(gate) * value
        else:
            wide = act(wide)
        return block.mlp_out(wide)


@dataclass(frozen=True)
class EncoderBlock:
    """One layer of an encoder."""

    self_norm: Seq2SeqNorm
    qkv: MergedLinear
    self_out: MergedLinear
    mlp_norm: Seq2SeqNorm
    mlp_in: MergedLinear
    mlp_out: MergedLinear


@dataclass(frozen=True)
class EncoderWeights:
    """Weights of a text encoder."""

    heads: int
    head_dim: int
    embed: Callable[[Tensor, Tensor], Tensor]  # (token ids [T], positions [T]) -> [T, H]
    blocks: tuple[EncoderBlock, ...]
    norm: Seq2SeqNorm | None  # final norm
    # By layer: biases [2 far + 1, H] by key position minus query position, from -far to far; () = no bias.
    position_biases: tuple[Tensor, ...] = ()


def find_activation(name: str, module: Any) -> Activation:
    """Return torch's operator for an activation of transformers, or transformers' module if there is none."""
    activation: Activation = TORCH_ACTIVATIONS.get(name, module)
    return activation
