"""The decoder of an encoder-decoder model over windows: one loop for every family, on weights laid out for it.

A layer attends to the text so far, then to what the encoder made of the source, then transforms. Norms stand before
each of the three (T5, mBART, Pegasus, Whisper) or after it (BART, Marian).
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
from foredraft.models.window import NORMED

Packer = Callable[[Tensor, Tensor | None, Arena], PackedWeight]
Activation = Callable[[Tensor], Tensor]
# names of transformers' activations that torch has in one operator, equal to rounding
ONE_OPERATOR: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


@dataclass(frozen=True)
class Norm:
    """Over the last axis; without a bias it is the root mean square that is divided by, and no mean is taken off."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: Any) -> "Norm":
        eps = module.eps if isinstance(module, nn.LayerNorm) else module.variance_epsilon
        bias = module.bias.detach() if isinstance(module, nn.LayerNorm) else None
        return cls(module.weight.detach(), bias, float(eps))

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self.eps))
        return self.weight * (wide * scale).to(self.weight.dtype)


class Product:
    """y = x W^T + b for one or several linear modules at once, their outputs side by side.

    Modules that are ours to change read their own part of the joined matrix afterwards: no weight is held twice.
    """

    def __init__(self, modules: Sequence[nn.Linear], is_ours: bool) -> None:
        self._modules = modules
        has_bias = any(module.bias is not None for module in modules)
        self.bias: Tensor | None = None
        self.weights = [module.weight.detach() for module in modules]
        if has_bias:
            rows = [m.weight.new_zeros(m.out_features) if m.bias is None else m.bias.detach() for m in modules]
            self.bias = torch.cat(rows)
        if is_ours and len(modules) > 1:
            joined, first = torch.cat(self.weights), 0
            for module in modules:
                module.weight = nn.Parameter(joined[first : first + module.out_features], requires_grad=False)
                first += module.out_features
            self.weights = [joined]

    def __call__(self, x: Tensor) -> Tensor:
        kind = self.weights[0].dtype  # T5 keeps one of its matrices wider than the others
        x = x if x.dtype == kind else x.to(kind)
        if len(self.weights) == 1:
            return F.linear(x, self.weights[0], self.bias)
        out = torch.cat([F.linear(x, weight) for weight in self.weights], -1)
        return out if self.bias is None else out + self.bias

    @property
    def dense(self) -> Tensor:
        """[n, k]"""
        return self.weights[0] if len(self.weights) == 1 else torch.cat(self.weights)

    def release(self) -> None:
        """Give up the weights: the numbers are somewhere else, and its modules will not run again."""
        for module in self._modules:
            module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        self.weights = []


Join = Callable[[Sequence[nn.Linear]], Product]


@dataclass(frozen=True)
class Block:
    """One decoder layer."""

    own_norm: Norm
    qkv: Product  # of the text so far
    own_out: Product
    cross_norm: Norm
    query: Product  # of the source, whose keys and values `cross_kv` makes once
    cross_kv: Product
    cross_out: Product
    inner_norm: Norm
    wide: Product  # gate and value side by side where it is gated
    narrow: Product


@dataclass(frozen=True)
class Shape:
    """What the layers have in common."""

    heads: int
    head_dim: int
    scale: float  # of the products of queries and keys
    is_gated: bool
    norms_after: bool
    activation: Activation
    activation_name: str


# (layer, queries [T, H, D] of the text so far or of the source) -> [T, H * D]
Own = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Cross = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class Head:
    """Logits of normalised states."""

    product: Product
    scale: float = 1.0  # of the states
    bias: Tensor | None = None  # [V]

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.product(x if self.scale == 1.0 else x * self.scale)
        return logits if self.bias is None else logits + self.bias


@dataclass(frozen=True)
class Stack:
    """The decoder. `embed`: ids and positions [T] -> [T, H]."""

    shape: Shape
    embed: Callable[[Tensor, Tensor], Tensor]
    blocks: tuple[Block, ...]
    norm: Norm | None
    head: Head
    # buckets by distance [far + 1, H] of every layer, or of all; None where positions are embedded
    biases: tuple[Tensor, ...] | None = None

    def forward(
        self, tokens: Tensor, positions: Tensor, own: Own, cross: Cross, taps: tuple[int, ...], logit_rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] and the tapped states [T, F], of packed rows."""
        x = self.embed(tokens, positions)
        seen = {0: x}
        for i, block in enumerate(self.blocks):
            x = self._layer(i, block, x, own, cross)
            if i + 1 in taps:
                seen[i + 1] = x
        if NORMED in taps:
            seen[NORMED] = x if self.norm is None else self.norm(x)
        features = torch.cat([seen[tap] for tap in taps], -1) if taps else None
        last = x.index_select(0, logit_rows)
        return self.head(last if self.norm is None else self.norm(last)), features

    def _layer(self, i: int, block: Block, x: Tensor, own: Own, cross: Cross) -> Tensor:
        shape = self.shape
        sizes = (3, shape.heads, shape.head_dim)
        if shape.norms_after:
            q, k, v = block.qkv(x).view(-1, *sizes).unbind(1)
            x = block.own_norm(x + block.own_out(own(i, q, k, v)))
            query = block.query(x).view(-1, *sizes[1:])
            x = block.cross_norm(x + block.cross_out(cross(i, query)))
            return block.inner_norm(x + self._transform(block, x))
        q, k, v = block.qkv(block.own_norm(x)).view(-1, *sizes).unbind(1)
        x = x + block.own_out(own(i, q, k, v)).to(x.dtype)
        query = block.query(block.cross_norm(x)).view(-1, *sizes[1:])
        x = x + block.cross_out(cross(i, query)).to(x.dtype)
        return x + self._transform(block, block.inner_norm(x)).to(x.dtype)

    def _transform(self, block: Block, x: Tensor) -> Tensor:
        wide, act = block.wide(x), self.shape.activation
        if self.shape.is_gated:
            gate, value = wide.chunk(2, -1)
            wide = act(gate) * value
        else:
            wide = act(wide)
        return block.narrow(wide)


@dataclass(frozen=True)
class EncoderBlock:
    """One layer of an encoder."""

    own_norm: Norm
    qkv: Product
    out: Product
    inner_norm: Norm
    wide: Product
    narrow: Product


@dataclass(frozen=True)
class EncoderParts:
    """An encoder of text. biases: [2 far + 1, H] by key position minus query position, from -far on, of every layer."""

    heads: int
    head_dim: int
    embed: Callable[[Tensor, Tensor], Tensor]
    blocks: tuple[EncoderBlock, ...]
    norm: Norm | None
    biases: tuple[Tensor, ...] = ()


def activation_of(name: str, module: Any) -> Activation:
    """The activation in one operator if there is one, else transformers' own."""
    found: Activation = ONE_OPERATOR.get(name, module)
    return found
