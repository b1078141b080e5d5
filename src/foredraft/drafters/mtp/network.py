"""Multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2): one more decoder layer of the target's own class.

At position t the network reads the embedding e of token t + 1 and h, the target's state after its final norm at t:
u = P [N_e(e); N_h(h)], f = N_o(layer(u)). The target's output matrix turns f into logits for token t + 2, and f is
the h of the next draft token. One layer is reused for all draft tokens (FastMTP, 2509.18362).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.checkpoints.schema import Checkpoint
from foredraft.drafters.common.target_access import derive_block_shape, get_packed_lm_head
from foredraft.drafters.mtp.shape import MtpShape
from foredraft.errors import ForedraftError
from foredraft.models.draft_layer import AttentionFunction
from foredraft.models.hf import HFModel
from foredraft.models.native.draft_layers import JoinedInput, NativeDraftLayers
from foredraft.models.native.family import FAMILIES
from foredraft.models.target_layer import TargetLayer


class MtpNetwork(nn.Module):
    """Draft network of `mtp`.

    Args:
        shape: flags of the layer.
        target: target whose layer class, embedding and output matrix the network uses.
    """

    def __init__(self, shape: MtpShape, target: HFModel) -> None:
        super().__init__()
        self.target = (target,)  # in a tuple, so that nn.Module does not register the target's weights
        self.runner = TargetLayer(target)
        kv = self.runner.kv
        windows = () if kv.sliding_window is None else (kv.sliding_window,)
        block = replace(derive_block_shape(target), kv_heads=kv.heads, head_dim=kv.width, sliding_windows=windows)
        self.shape = replace(shape, block=block)
        self.embedding_norm = self.runner.make_norm(shape.hidden)
        self.state_norm = self.runner.make_norm(shape.hidden)
        self.projection = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layer = self.runner.module
        self.output_norm = self.runner.make_norm(shape.hidden) if shape.has_output_norm else nn.Identity()
        self.embedding = target.embedding  # [V, H]

    def project_features(self, features: Tensor) -> Tensor:
        """Return the features [.., H] unchanged."""
        return features

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """Predict the next features, as `EagleNetwork.forward`."""
        embedded = F.embedding(tokens, self.embedding).to(features.dtype)
        if self.shape.zeroes_first:
            embedded = embedded * (positions != 0)[..., None]
        inputs = [self.embedding_norm(embedded), self.state_norm(features)]
        if self.shape.puts_state_first:
            inputs.reverse()
        x = self.output_norm(self.runner.forward(self.projection(torch.cat(inputs, -1)), positions, attend))
        return x, x

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the target's logits [.., V] of states [.., H]."""
        return self.target[0].compute_logits(states.to(self.embedding.dtype))


def load_network(checkpoint: Checkpoint, target: HFModel) -> MtpNetwork:
    """Make a network with the tensors of a checkpoint.

    Raises:
        ForedraftError: for a drafter of another method, or one whose tensors do not fit the target's layer class.
    """
    network = MtpNetwork(checkpoint.require_shape(MtpShape, "MTP layer"), target)
    _check_tensors(checkpoint, network.state_dict())
    network.load_state_dict(checkpoint.tensors)
    return network


def make_native(network: MtpNetwork) -> NativeDraftLayers | None:
    """Convert the layer to native CPU code; None if the target has none, or if the layer zeroes position 0."""
    target = network.target[0]
    lm_head = get_packed_lm_head(target)
    if lm_head is None or target.fused is None or network.shape.zeroes_first:
        return None
    projection = network.projection
    if projection.weight.dtype != target.fused.dtype:
        return None
    if network.shape.puts_state_first:
        projection.weight = nn.Parameter(torch.cat(projection.weight.detach().chunk(2, -1)[::-1], -1))
    config = target.model.config.get_text_config()
    layer_input = JoinedInput(
        projection, network.embedding_norm, network.state_norm, FAMILIES[config.model_type].norms.offset
    )
    return NativeDraftLayers.from_target_layer(
        network.layer,
        layer_input,
        network.output_norm if network.shape.has_output_norm else None,
        network.embedding,
        lm_head,
        target.fused,
        config,
        network.runner.kv.sliding_window,
    )


def _check_tensors(checkpoint: Checkpoint, expected: Mapping[str, Tensor]) -> None:
    tensors = checkpoint.tensors
    for name in sorted(tensors.keys() ^ expected.keys()):
        problem = "is missing in its MTP layer" if name in expected else "has no place in an MTP layer of the target"
        raise ForedraftError(f"{checkpoint.folder}: {name} {problem}; the layer is of another model class")
    for name, tensor in expected.items():
        if tensors[name].shape != tensor.shape:
            raise ForedraftError(
                f"{checkpoint.folder}: {name} is {list(tensors[name].shape)} and has to be {list(tensor.shape)}; the "
                "layer was made for another target"
            )
