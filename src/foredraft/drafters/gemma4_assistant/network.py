"""Network of a Gemma-4 assistant: decoder layers of queries alone, over keys and values of the target.

All draft tokens have the position of the last committed token, and see the target's keys and values before it. A row
depends on the draft tokens of its path by its input state alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.gemma4_assistant.ordered_embedding import OrderedEmbedding
from foredraft.drafters.gemma4_assistant.shape import AssistantRope, AssistantShape
from foredraft.models.draft_layer import RotaryFactors, apply_rotary

# (layer, rotated queries [R, Hq, D]) -> [R, Hq, D]; scores are not scaled
AttendToTarget = Callable[[int, Tensor], Tensor]


class WideNorm(nn.Module):
    """Root-mean-square norm over the last axis, scaled before the result is rounded to the dtype of the input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight.to(wide.dtype)).to(x.dtype)


class QueryAttention(nn.Module):
    """Query and output projections of a layer."""

    def __init__(self, shape: AssistantShape, layer: int) -> None:
        super().__init__()
        self.head_dim = shape.head_dims[layer]
        width = shape.heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.q_norm = WideNorm(self.head_dim, shape.eps)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor, rotary: RotaryFactors, layer: int, attend: AttendToTarget) -> Tensor:
        """Compute [R, H] from the input [R, H]."""
        query = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))  # [R, Hq, D]
        mixed = attend(layer, apply_rotary(query, rotary))
        return self.o_proj(mixed.flatten(-2).to(x.dtype))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """Gated transform of a layer, with the tanh form of GELU."""

    def __init__(self, shape: AssistantShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))  # type: ignore[no-any-return]


class AssistantLayer(nn.Module):
    """Decoder layer: a norm before and after each part, and a scalar on the output."""

    layer_scalar: Tensor  # [1]

    def __init__(self, shape: AssistantShape, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.self_attn = QueryAttention(shape, layer)
        self.mlp = GatedMLP(shape)
        self.input_layernorm = WideNorm(shape.hidden, shape.eps)
        self.post_attention_layernorm = WideNorm(shape.hidden, shape.eps)
        self.pre_feedforward_layernorm = WideNorm(shape.hidden, shape.eps)
        self.post_feedforward_layernorm = WideNorm(shape.hidden, shape.eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: Tensor, rotary: RotaryFactors, attend: AttendToTarget) -> Tensor:
        """Compute the residual stream [R, H] after the layer from the one before it."""
        mixed = self.self_attn(self.input_layernorm(x), rotary, self.layer, attend)
        x = x + self.post_attention_layernorm(mixed)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class AssistantRotary:
    """Factors cos and sin by position. Not a module, so that the frequencies stay float32."""

    def __init__(self, rope: AssistantRope, head_dim: int) -> None:
        rotated = int(rope.rotated_share * head_dim // 2)
        frequencies = 1.0 / rope.theta ** (torch.arange(0, 2 * rotated, 2).float() / head_dim)
        self.inv_freq = F.pad(frequencies, (0, head_dim // 2 - rotated)) / rope.factor  # [D / 2]

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> RotaryFactors:
        """Compute cos and sin [R, D] of positions [R]."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[:, None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class AssistantNetwork(nn.Module):
    """Assistant. State-dict names are those of published folders, without the prefix `model.`."""

    def __init__(self, shape: AssistantShape) -> None:
        super().__init__()
        self.shape = shape
        self.pre_projection = nn.Linear(2 * shape.target_hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList(AssistantLayer(shape, layer) for layer in range(shape.num_layers))
        self.norm = WideNorm(shape.hidden, shape.eps)
        self.post_projection = nn.Linear(shape.hidden, shape.target_hidden, bias=False)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab_size, bias=False)
        self.masked_embedding = OrderedEmbedding(shape) if shape.num_centroids else None
        self._rotary = {
            kind: AssistantRotary(shape.ropes[kind], shape.head_dims[shape.layer_kinds.index(kind)])
            for kind in dict.fromkeys(shape.layer_kinds)
        }

    def forward(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: AttendToTarget) -> Tensor:
        """Read one token per row.

        Args:
            embeddings: embeddings [R, B] of the tokens, as the target's first layer reads them.
            states: states [R, B] before the tokens: of the target for a root, of this network for a draft token.
            positions: positions [R] of the last committed tokens.
            attend: attention to the target's keys and values.

        Returns:
            Hidden states [R, H] for `compute_logits` and `post_projection`. The latter gives the next `states`.
        """
        x: Tensor = self.pre_projection(torch.cat([embeddings, states.to(embeddings.dtype)], -1))
        rotary = {kind: embed(positions, x.dtype) for kind, embed in self._rotary.items()}
        for layer, kind in zip(self.layers, self.shape.layer_kinds, strict=True):
            x = layer(x, rotary[kind], attend)
        return self.norm(x)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [R, V]; -inf for tokens outside the selected clusters of ordered embeddings."""
        if self.masked_embedding is None:
            return self.lm_head(hidden)  # type: ignore[no-any-return]
        return self.masked_embedding(hidden, self.lm_head.weight)  # type: ignore[no-any-return]

    def get_output_embeddings(self) -> nn.Module:
        """Return the output matrix, under the name that transformers' models have for it."""
        return self.lm_head

    @torch.no_grad()
    def probe(self) -> Tensor:
        """Compute logits once, which shows whether the output matrix is read without its module."""
        return self.compute_logits(self.norm.weight[None])


def load_network(checkpoint: Checkpoint) -> AssistantNetwork:
    """Make a network with the tensors of a checkpoint."""
    network = AssistantNetwork(checkpoint.require_shape(AssistantShape, "Gemma-4 assistant"))
    network.load_state_dict(checkpoint.tensors)
    return network
