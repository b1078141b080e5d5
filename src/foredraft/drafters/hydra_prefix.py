"""Hydra++ (2402.05109, section 4): a decoder layer over the target's states, with memory of its own, whose output the
heads read in place of the newest state.

The layer is one of the target's own proportions, and reads no token. Its memory goes along with the text as EAGLE's
does, so a draft costs one pass over the states that survived since the last one, and then the heads. It runs on torch's
operators; the heads run as they do without it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from foredraft.checkpoints.base import HydraShape
from foredraft.drafters import branch as paged
from foredraft.drafters.base import Context
from foredraft.drafters.borrowed import block_like
from foredraft.drafters.growth import Plan
from foredraft.drafters.recurrent import FeatureDrafter
from foredraft.drafters.stepped import Branch, Steps, grown
from foredraft.errors import ForedraftError
from foredraft.models.block import Attend, BlockShape, Layer, RMSNorm, Rotary, causal
from foredraft.models.feature_lm import FeatureLM
from foredraft.models.lm import HFModel


@dataclass(frozen=True)
class LayerShape:
    block: BlockShape
    num_layers: int = 1


def prefix_block(shape: HydraShape, target: HFModel) -> BlockShape:
    """A layer of the target's proportions with the rotary parameters that the heads were trained with."""
    assert shape.prefix is not None
    return replace(block_like(target), rope=shape.prefix.rope)


class PrefixLayer(nn.Module):
    """A decoder of one layer over states. Its tensors have the names that HydraShape documents, after the prefix."""

    def __init__(self, block: BlockShape) -> None:
        super().__init__()
        self.shape = LayerShape(block)
        self.layers = nn.ModuleList([Layer(block)])
        self.norm = RMSNorm(block.hidden, block.eps)
        self.rotary = Rotary(block)

    def taken(self, features: Tensor) -> Tensor:
        return features

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """As FeatureNetwork has it; the tokens are not read."""
        x = self.layers[0](features, self.rotary(positions, features.dtype), 0, attend)
        x = self.norm(x)
        return x, x

    def logits(self, states: Tensor) -> Tensor:
        """None of its own: [.., 0]."""
        return states[..., :0]

    def over(self, features: Tensor) -> Tensor:
        """[B, L, H] states of whole texts -> what heads read at every position."""
        positions = torch.arange(features.shape[1], device=features.device).expand(len(features), -1)
        following: Tensor = self(positions, features, positions, causal)[1]
        return following


def check(shape: HydraShape, block: BlockShape, folder: str) -> None:
    """Raises ForedraftError where a stored layer is not of the proportions of the target's own."""
    assert shape.prefix is not None
    stored = (shape.prefix.query, shape.prefix.key, shape.prefix.intermediate)
    wanted = (block.heads * block.head_dim, block.kv_heads * block.head_dim, block.intermediate)
    if stored != wanted:
        raise ForedraftError(
            f"{folder}: its prefix layer has {stored[0]} rows of queries, {stored[1]} of keys and {stored[2]} inside, "
            f"and a layer of the target has {wanted[0]}, {wanted[1]} and {wanted[2]}; use heads made for this target"
        )


class PrefixDrafter(FeatureDrafter):
    """The memory of a FeatureDrafter, and heads that grow every draft from what it said last."""

    def __init__(self, lm: FeatureLM, tap: int, steps: Steps, plan: Plan, context: Context) -> None:
        super().__init__(lm, (tap,), plan, context)
        self.steps = steps

    def _grow(self, branches: list[paged.Branch], page_size: int) -> None:
        growths = [branch.growth for branch in branches]
        made = [Branch(b, g, self._roots[g.request.slot].feature[0]) for b, g in enumerate(growths)]
        grown(self.steps, made, self.context.vocab_size)
