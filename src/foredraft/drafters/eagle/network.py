"""EAGLE (2401.15077) with the dynamic tree of EAGLE-2 (2406.16858): a decoder layer over the target's hidden states.

"Head" is the trained part: the input projection and the decoder layers, one by default. "lm_head" is the output matrix,
which belongs to the target.

At position t the network reads the embedding of token t + 1 and h_t, the target's hidden state after its final norm at
token t. Its output approximates h_{t+1}. The target's output matrix (lm_head) turns it into logits for token t + 2.
`FeatureDrafter` drafts with this network.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.native_layers import make_native_layers
from foredraft.drafters.common.target_access import get_packed_lm_head
from foredraft.drafters.eagle.checkpoint import EagleShape
from foredraft.models.draft_layer import AttentionFunction, DraftLayer, RotaryEmbedding
from foredraft.models.hf import HFModel
from foredraft.models.native.draft_layers import JoinedInput, NativeDraftLayers


class EagleNetwork(nn.Module):
    """Draft network of EAGLE. The names in its state dict are those of published checkpoints.

    Args:
        shape: sizes of the network.
        target: target whose embedding and output matrix the network uses.
    """

    def __init__(self, shape: EagleShape, target: HFModel) -> None:
        super().__init__()
        hidden = shape.block.hidden
        self.shape = shape
        self.target = (target,)  # in a tuple, so that nn.Module does not register the target's weights
        self.fc = nn.Linear(2 * hidden, hidden, bias=shape.has_fc_bias)
        self.layers = nn.ModuleList(DraftLayer(shape.block, has_input_norm=i > 0) for i in range(shape.num_layers))
        self.rotary = RotaryEmbedding(shape.block)
        # Some checkpoints have an embedding of their own. `bind_to_target` then sets `embedding` to that one. If it was
        # never trained, as in some published files, `embedding` stays the target's (`choose_embedding`).
        if shape.has_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)
        self.embedding = target.embedding  # [V, H]

    def project_features(self, features: Tensor) -> Tensor:
        """Return the features [.., H] unchanged: they are states of one layer, and the network has the same width."""
        return features

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """Predict the next features.

        Args:
            tokens: [B, L] tokens t + 1.
            features: [B, L, H] features t: states of the target, or outputs of this network.
            positions: [B, L] positions t, for the rotary embedding.
            attend: attention function: causal in training, over the KV pool when the network drafts.

        Returns:
            States for `compute_logits` and next features, which are the same tensor [B, L, H] here.
        """
        embedded = F.embedding(tokens, self.embedding).to(features.dtype)
        x = self.fc(torch.cat([embedded, features], -1))
        rotary = self.rotary(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            # Layer 0 has no input norm, so its attention reads x. None lets a layer apply its own input norm.
            x = layer(x, rotary, i, attend, attention_input=x if i == 0 else None)
        return x, x

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the target's logits [.., V] of states [.., H]."""
        return self.target[0].compute_logits(states.to(self.embedding.dtype))


def load_network(checkpoint: Checkpoint, target: HFModel) -> EagleNetwork:
    """Make a network with the tensors of a checkpoint. Raises ForedraftError for a head of another method."""
    network = EagleNetwork(checkpoint.require_shape(EagleShape, "EAGLE head"), target)
    network.load_state_dict(checkpoint.tensors)
    return network


def make_native(network: EagleNetwork) -> NativeDraftLayers | None:
    """Convert the network to native CPU code; None if the target or a layer is not supported."""
    return make_native_layers(network, JoinedInput(network.fc), get_packed_lm_head(network.target[0]))
