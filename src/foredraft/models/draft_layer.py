"""Llama decoder layer of drafters, used for training and for drafting over paged KV.

Attention is an argument, so the same forward serves causal training, training-time test and a token tree over paged KV.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# (layer, query [B, L, Hq, D], key and value [B, L, Hkv, D], rotated) -> [B, L, Hq, D]
AttentionFunction = Callable[[int, Tensor, Tensor, Tensor], Tensor]
RotaryFactors = tuple[Tensor, Tensor]  # cos and sin [B, L, D]


def make_default_rope() -> dict[str, Any]:
    """Return the rotary parameters of a Llama layer whose configuration has none."""
    return {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class DraftLayerShape:
    """Dimensions of a decoder layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-6
    max_positions: int = 2048
    rope: dict[str, Any] = field(default_factory=make_default_rope)
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_qk_norm: bool = False
    # By layer: maximum number of positions that a row sees, its own included; None or () = all.
    sliding_windows: tuple[int | None, ...] = ()

    def get_sliding_window(self, layer: int) -> int | None:
        """Return the maximum number of positions that a row of a layer sees; None = all."""
        return self.sliding_windows[layer] if self.sliding_windows else None


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class DraftAttention(nn.Module):
    """Projections of an attention layer. The attention itself is an argument of `forward`.

    Args:
        shape: dimensions of the layer.
        width: width of the input, which may differ from `shape.hidden` (EAGLE-3 reads token and feature).
    """

    def __init__(self, shape: DraftLayerShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, query, bias=shape.has_qkv_bias)
        self.k_proj = nn.Linear(width, key, bias=shape.has_qkv_bias)
        self.v_proj = nn.Linear(width, key, bias=shape.has_qkv_bias)
        self.o_proj = nn.Linear(query, shape.hidden, bias=shape.has_out_bias)
        if shape.has_qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, rotary: RotaryFactors, layer: int, attend: AttentionFunction) -> Tensor:
        """Compute [B, L, hidden] from the input [B, L, width]."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.shape.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.shape.has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        mixed = attend(layer, apply_rotary(query, rotary), apply_rotary(key, rotary), value)
        return self.o_proj(mixed.flatten(-2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Gated SiLU transform of a Llama layer."""

    def __init__(self, shape: DraftLayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class RotaryEmbedding:
    """Factors cos and sin by position, equal to transformers' for every kind of `rope_parameters`.

    This is not a module, so a conversion of the network's dtype does not reduce the precision of the frequencies.
    """

    def __init__(self, shape: DraftLayerShape) -> None:
        config = LlamaConfig(
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_positions,
            rope_parameters=dict(shape.rope),
        )
        embedding = LlamaRotaryEmbedding(config)
        self.scaling: float = embedding.attention_scaling
        self.inv_freq: Tensor = embedding.inv_freq.clone()  # [D / 2]

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> RotaryFactors:
        """Compute cos and sin [B, L, D] of positions [B, L]."""
        wide = torch.promote_types(dtype, torch.float32)
        if self.inv_freq.device != positions.device:
            self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[..., None].to(wide) * self.inv_freq.to(wide)
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def apply_rotary(x: Tensor, rotary: RotaryFactors) -> Tensor:
    """Rotate x [B, L, H, D] by the factors cos and sin [B, L, D]."""
    cos, sin = rotary[0][..., None, :], rotary[1][..., None, :]
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def attend_causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally over whole sequences, without KV cache. An AttentionFunction for training."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class DraftLayer(nn.Module):
    """Llama decoder layer.

    Args:
        shape: dimensions of the layer.
        width: width of the attention's input. Default None = `shape.hidden`.
        has_input_norm: whether the layer normalises the attention's input. Default True.
    """

    def __init__(self, shape: DraftLayerShape, width: int | None = None, has_input_norm: bool = True) -> None:
        super().__init__()
        if has_input_norm:
            self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = DraftAttention(shape, width or shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryFactors,
        layer: int,
        attend: AttentionFunction,
        attention_input: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer's output.

        Args:
            x: residual stream [B, L, hidden].
            rotary: cos and sin of the positions.
            layer: index of the layer, for `attend`.
            attend: attention function.
            attention_input: input of the attention [B, L, width]; None = x after the input norm.

        Returns:
            [B, L, hidden].
        """
        x = x + self.self_attn(
            self.input_layernorm(x) if attention_input is None else attention_input, rotary, layer, attend
        )
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
