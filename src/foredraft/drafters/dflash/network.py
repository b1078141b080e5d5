"""Network of DFlash (2602.06036): decoder layers over a block of masks, which read the target's states as keys.

Every state of the target gives a context row: keys and values in each layer, from the projected state alone. A block is
the last committed token and masks. Its rows see the context rows before the block and, in most heads, the whole block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.last_hidden_state import HeadLinear
from foredraft.drafters.dflash.markov import ConfidenceHead, make_markov_head
from foredraft.drafters.dflash.shape import DFlashShape
from foredraft.models.draft_layer import DraftLayer, RMSNorm, RotaryEmbedding, apply_rotary
from foredraft.models.hf import HFModel

KeysAndValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BlockContext:
    """Context rows of n sequences, and which of them the A blocks of each sequence see."""

    layers: Sequence[KeysAndValues]  # by layer: keys and values [n, L, Hkv, D], rotated
    positions: Tensor  # [n, L]
    visible: Tensor  # [n, A, L] bool


class DFlashNetwork(nn.Module):
    """Draft network of DFlash. State-dict names are those of published checkpoints."""

    def __init__(self, shape: DFlashShape, target: HFModel) -> None:
        super().__init__()
        block = shape.block
        self.shape = shape
        self.target = (target,)  # in a tuple, so that its weights are not registered here
        self.fc = nn.Linear(len(shape.hidden_layers) * block.hidden, block.hidden, bias=False)
        self.hidden_norm = RMSNorm(block.hidden, block.eps)
        self.layers = nn.ModuleList(DraftLayer(block) for _ in range(shape.num_layers))
        self.norm = RMSNorm(block.hidden, block.eps)
        self.markov_head = make_markov_head(shape)
        self.confidence_head = ConfidenceHead(shape) if shape.has_confidence else None
        self.rotary = RotaryEmbedding(block)
        self.embedding = target.embedding  # [V, H]
        self.native_head: HeadLinear | None = None  # the target's output matrix as a direct native product

    def compute_context(self, states: Tensor, positions: Tensor) -> list[KeysAndValues]:
        """Compute keys and values [n, L, Hkv, D] of every layer from target states [n, L, F] at positions [n, L]."""
        x = self.hidden_norm(self.fc(states.to(self.fc.weight.dtype)))
        rotary, context = self.rotary(positions, x.dtype), []
        for layer in self.layers:
            attention: Any = layer.self_attn
            keys, values = (
                project(x).unflatten(-1, (-1, self.shape.block.head_dim))
                for project in (attention.k_proj, attention.v_proj)
            )
            if self.shape.block.has_qk_norm:
                keys = attention.k_norm(keys)
            context.append((apply_rotary(keys, rotary), values))
        return context

    def forward(self, roots: Tensor, starts: Tensor, context: BlockContext) -> Tensor:
        """Compute the states of blocks.

        Args:
            roots: tokens [n, A] at the first rows of the blocks.
            starts: positions [n, A] of the roots.
            context: context rows of the n sequences.

        Returns:
            States [n, A, S, H] for `compute_logits`.
        """
        size = self.shape.block_size
        tokens = roots[..., None].repeat(1, 1, size)
        tokens[..., 1:] = self.shape.mask_token_id
        positions = starts[..., None] + torch.arange(size, device=starts.device)  # [n, A, S]
        x = F.embedding(tokens, self.embedding).to(self.fc.weight.dtype).flatten(1, 2)
        rotary = self.rotary(positions.flatten(1, 2), x.dtype)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (rows.view(*positions.shape, *rows.shape[2:]) for rows in (query, key, value))
            bias = self._make_bias(layer, positions, context, x.dtype)
            return attend_blocks(q, k, v, *context.layers[layer], bias).flatten(1, 2)

        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, i, attend)
        return self.norm(x).view(*positions.shape, -1)  # type: ignore[no-any-return]

    def compute_logits(self, states: Tensor) -> Tensor:
        """Compute logits [.., V] with the target's output matrix from states [.., H], without the Markov head."""
        if self.native_head is not None:
            rows = states.reshape(-1, states.shape[-1]).contiguous()  # [R, H]
            return self.native_head(rows).view(*states.shape[:-1], -1)
        return self.target[0].compute_logits(states.to(self.embedding.dtype))

    def _make_bias(self, layer: int, positions: Tensor, context: BlockContext, dtype: torch.dtype) -> Tensor:
        """Make the additive mask [n, A, S, L + S] of a layer: context rows, then the rows of the own block."""
        size = positions.shape[-1]
        window = self.shape.block.get_sliding_window(layer)
        visible = context.visible[:, :, None].expand(-1, -1, size, -1)
        own = torch.ones(size, size, dtype=torch.bool, device=positions.device)
        own = own.tril() if self.shape.is_causal(layer) else own
        if window is not None:
            visible = visible & (positions[..., None] - context.positions[:, None, None] < window)
            own = own.triu(1 - window)
        every = torch.cat([visible, own.expand(*positions.shape, size)], -1)
        return torch.zeros(every.shape, dtype=dtype, device=every.device).masked_fill(~every, -torch.inf)


def attend_blocks(
    query: Tensor,  # [n, A, S, Hq, D]
    key: Tensor,  # [n, A, S, Hkv, D] of the own block
    value: Tensor,  # [n, A, S, Hkv, D]
    context_keys: Tensor,  # [n, L, Hkv, D]
    context_values: Tensor,  # [n, L, Hkv, D]
    bias: Tensor,  # [n, A, S, L + S]
) -> Tensor:
    """Attend from every row of a block to the context rows of its sequence and to its own block.

    The scores of both parts share one softmax, so the context is neither copied nor repeated for each block.

    Returns:
        [n, A, S, Hq, D].
    """
    q = query.view(*key.shape[:4], -1, key.shape[4]) * query.shape[-1] ** -0.5  # [n, A, S, Hkv, Hq / Hkv, D]
    far = torch.einsum("nashgd,nlhd->nahgsl", q, context_keys)
    near = torch.einsum("nashgd,nathd->nahgst", q, key)
    scores = torch.cat([far, near], -1) + bias[:, :, None, None]
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(value.dtype)
    length = context_keys.shape[1]
    mixed = torch.einsum("nahgsl,nlhd->nashgd", weights[..., :length], context_values)
    return (mixed + torch.einsum("nahgst,nathd->nashgd", weights[..., length:], value)).flatten(3, 4)


def load_network(checkpoint: Checkpoint, target: HFModel) -> DFlashNetwork:
    """Make a network with the tensors of a checkpoint."""
    network = DFlashNetwork(checkpoint.require_shape(DFlashShape, "DFlash head"), target)
    network.load_state_dict(checkpoint.tensors)
    return network
