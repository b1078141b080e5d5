"""Hydra++ (2402.05109, section 4): a decoder layer over the target's states. The heads read its output.

The layer has the target's sizes, its own KV cache, and reads no tokens. `FeatureDrafter` maintains the cache as for
EAGLE: a draft costs one pass of the layer over the pending states, then the heads. The layer runs in torch, the heads
as in Hydra.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from foredraft.drafters.common.device_loop.loop import make_draft_loop
from foredraft.drafters.common.feature_drafter import FeatureDrafter
from foredraft.drafters.common.growing_kv_draft import GrowingKVDraft
from foredraft.drafters.common.last_hidden_state import stack_states
from foredraft.drafters.common.step_drafter import (
    GrowingStepDraft,
    StepLoopNetwork,
    StepRunner,
    build_trees,
    draft_native_chains,
)
from foredraft.drafters.common.target_access import derive_block_shape
from foredraft.drafters.common.tree_builder import TreeSpec
from foredraft.drafters.hydra.checkpoint import HydraShape
from foredraft.drafters.method import DrafterContext
from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import (
    AttentionFunction,
    DraftLayer,
    DraftLayerShape,
    RMSNorm,
    RotaryEmbedding,
    attend_causal,
)
from foredraft.models.feature_lm import FeatureLM
from foredraft.models.hf import HFModel


@dataclass(frozen=True)
class PrefixLayerShape:
    """Sizes of the layer, in the form that `make_feature_lm` reads."""

    block: DraftLayerShape
    num_layers: int = 1


def derive_prefix_block(shape: HydraShape, target: HFModel) -> DraftLayerShape:
    """Return the shape of a target layer with the rotary parameters that the heads were trained with."""
    assert shape.prefix is not None
    return replace(derive_block_shape(target), rope=shape.prefix.rope)


class HydraPrefixLayer(nn.Module):
    """Decoder of one layer over states. Its tensors have the names that HydraShape documents, without the prefix."""

    def __init__(self, block: DraftLayerShape) -> None:
        super().__init__()
        self.shape = PrefixLayerShape(block)
        self.layers = nn.ModuleList([DraftLayer(block)])
        self.norm = RMSNorm(block.hidden, block.eps)
        self.rotary = RotaryEmbedding(block)

    def project_features(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """Run the layer as a FeatureNetwork; the tokens are not read."""
        x = self.layers[0](features, self.rotary(positions, features.dtype), 0, attend)
        x = self.norm(x)
        return x, x

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return logits of width 0, since the heads make the logits."""
        return states[..., :0]

    def encode_sequences(self, features: Tensor) -> Tensor:
        """Compute the heads' input [B, L, H] from target states [B, L, H] of whole sequences."""
        positions = torch.arange(features.shape[1], device=features.device).expand(len(features), -1)
        encoded: Tensor = self(positions, features, positions, attend_causal)[1]
        return encoded


def check_prefix_shape(shape: HydraShape, block: DraftLayerShape, folder: str) -> None:
    """Raise ForedraftError if a stored layer does not have the sizes of the target's layers."""
    assert shape.prefix is not None
    stored = (shape.prefix.query, shape.prefix.key, shape.prefix.intermediate)
    expected = (block.heads * block.head_dim, block.kv_heads * block.head_dim, block.intermediate)
    if stored != expected:
        raise ForedraftError(
            f"{folder}: its prefix layer has {stored[0]} rows of queries, {stored[1]} of keys and {stored[2]} inside, "
            f"and a layer of the target has {expected[0]}, {expected[1]} and {expected[2]}; use heads of this target"
        )


class HydraPrefixDrafter(FeatureDrafter):
    """FeatureDrafter whose network is the prefix layer. Hydra heads grow every draft from its last output."""

    def __init__(
        self, lm: FeatureLM, hidden_layer: int, runner: StepRunner, tree_spec: TreeSpec, context: DrafterContext
    ) -> None:
        super().__init__(lm, (hidden_layer,), tree_spec, context)
        self.runner = runner
        self.loop = make_draft_loop(StepLoopNetwork(runner, context.vocab_size), tree_spec, context.device)

    def _build_trees(self, drafts: list[GrowingKVDraft], page_size: int) -> None:
        builders = [draft.builder for draft in drafts]
        step_drafts = [
            GrowingStepDraft(builder, batch_index=b, state=self._root_outputs[builder.request.slot].feature[0])
            for b, builder in enumerate(builders)
        ]
        if draft_native_chains(self.runner, step_drafts, self.context.vocab_size):
            for draft, step_draft in zip(drafts, step_drafts, strict=True):
                draft.finished = step_draft.finished
            return
        states = stack_states([draft.state for draft in step_drafts])
        if self.loop is None or not self.loop.grow(step_drafts, [states]):
            build_trees(self.runner, step_drafts, self.context.vocab_size)
