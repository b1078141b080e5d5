"""EAGLE-3 (2503.01840): a decoder layer over target states of several depths, with its own output matrix.

Training uses the token loss alone, over several steps on the network's own outputs, so its features need not resemble
target states. Its vocabulary may be a subset of the target's. `FeatureDrafter` does the drafting.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.last_hidden_state import HeadLinear, make_packed_linear
from foredraft.drafters.common.native_layers import make_native_layers
from foredraft.drafters.common.target_access import get_packed_lm_head
from foredraft.drafters.eagle3.shape import Eagle3Shape
from foredraft.errors import ForedraftError
from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PackedWeight
from foredraft.models.draft_layer import AttentionFunction, DraftLayer, RMSNorm, RotaryEmbedding
from foredraft.models.hf import HFModel
from foredraft.models.native.draft_layers import NativeDraftLayers, PairedInput


class Eagle3Network(nn.Module):
    """Draft network of EAGLE-3. State-dict names are those of published checkpoints, with `layers.0` for `midlayer`."""

    def __init__(self, shape: Eagle3Shape, target: HFModel) -> None:
        super().__init__()
        block, hidden = shape.block, shape.block.hidden
        self.shape = shape
        self.target = (target,)  # in a tuple, so that its weights are not registered here
        width = len(shape.hidden_layers) * shape.target_hidden
        if shape.has_fc:
            self.fc = nn.Linear(width, hidden, bias=shape.has_fc_bias)
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(width, block.eps)
        if shape.has_fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.target_hidden, block.eps) for _ in shape.hidden_layers)
        self.layers = nn.ModuleList(DraftLayer(block, 2 * hidden if i == 0 else None) for i in range(shape.num_layers))
        self.layers[0].hidden_norm = RMSNorm(hidden, block.eps)
        self.norm = RMSNorm(hidden, block.eps)
        self.rotary = RotaryEmbedding(block)
        if shape.has_own_head:
            self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        if shape.draft_vocab_size != shape.vocab_size:
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        if shape.has_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, hidden)
        if shape.mask_token_id is not None:
            self.register_parameter("mask_hidden", nn.Parameter(torch.zeros(1, 1, width)))
        self.embedding = target.embedding  # [V, H]
        self.native_fc: HeadLinear | None = None  # takes the place of `fc`, with float32 output

    @property
    def mask_token_id(self) -> int:
        """Token of the rows that stand for draft tokens. The shape must have one."""
        assert self.shape.mask_token_id is not None, "the head drafts one token after another"
        return self.shape.mask_token_id

    def project_mask(self) -> Tensor:
        """Compute the feature [1, H] of the rows that stand for draft tokens."""
        return self.project_features(self.get_parameter("mask_hidden")[0])

    @property
    def token_ids(self) -> Tensor | None:
        """Target token id [Vd] of each draft token; None if the vocabularies are the same."""
        offsets = getattr(self, "d2t", None)
        return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets

    def project_features(self, features: Tensor) -> Tensor:
        if self.shape.norm_before_fc:
            features = self.input_norm(features)
        if self.shape.has_fc_norm:
            chunks = features.chunk(len(self.shape.hidden_layers), -1)
            features = torch.cat([norm(x) for norm, x in zip(self.fc_norm, chunks, strict=True)], -1)
        if not self.shape.has_fc:
            return features
        return self.fc(features) if self.native_fc is None else self.native_fc(features)

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        first: Any = self.layers[0]
        embedded = first.input_layernorm(F.embedding(tokens, self.embedding).to(features.dtype))
        normed = first.hidden_norm(features)
        x = normed if self.shape.norm_before_residual else features
        rotary = self.rotary(positions, x.dtype)
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, i, attend, torch.cat([embedded, normed], -1) if i == 0 else None)
        states = self.norm(x)
        return states, states if self.shape.feeds_normed else x

    def compute_logits(self, states: Tensor) -> Tensor:
        if self.shape.has_own_head:
            return self.lm_head(states)  # type: ignore[no-any-return]
        return self.target[0].compute_logits(states.to(self.embedding.dtype))


def load_network(checkpoint: Checkpoint, target: HFModel) -> Eagle3Network:
    """Make a network with the tensors of a checkpoint. Raises ForedraftError if they do not fit the target."""
    shape = checkpoint.require_shape(Eagle3Shape, "EAGLE-3 head")
    is_narrower = shape.block.hidden != target.hidden_size
    if is_narrower and not (shape.has_embedding and shape.has_own_head):
        raise ForedraftError(
            f"{checkpoint.folder} is {shape.block.hidden} wide and {target.name} {target.hidden_size}, and has no "
            "embed_tokens or lm_head; it was trained for another target, or exported without them"
        )
    network = Eagle3Network(shape, target)
    network.load_state_dict(checkpoint.tensors)
    return network


def make_native(network: Eagle3Network) -> NativeDraftLayers | None:
    """Convert the network to native CPU code; None if the target or a layer is not supported."""
    shape = network.shape
    first: Any = network.layers[0]
    lm_head = network.lm_head.weight.detach() if shape.has_own_head else get_packed_lm_head(network.target[0])
    layer_input = PairedInput(first.hidden_norm, shape.norm_before_residual)
    native = make_native_layers(network, layer_input, lm_head, network.norm, shape.feeds_normed)
    if native is not None and shape.has_fc:
        bias = None if network.fc.bias is None else network.fc.bias.detach()
        network.native_fc = make_packed_linear(PackedWeight.pack(network.fc.weight.detach(), bias, Arena()))
        network.fc.weight = nn.Parameter(network.fc.weight.new_empty(0), requires_grad=False)
    return native
