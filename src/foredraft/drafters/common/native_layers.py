"""Native code of the decoder layers that a head adds to its target."""

from typing import Any

from torch import Tensor

from foredraft.kernels.linear import PackedWeight
from foredraft.models.draft_layer import RMSNorm
from foredraft.models.native.draft_layers import JoinedInput, NativeDraftLayers, PairedInput, explain_unsupported


def make_native_layers(
    network: Any,
    layer_input: JoinedInput | PairedInput,
    lm_head: PackedWeight | Tensor | None,
    norm: RMSNorm | None = None,
    has_normed_output: bool = False,
) -> NativeDraftLayers | None:
    """Convert the decoder layers of a head to native CPU code, which takes over their weights.

    Args:
        network: module with `layers`, `rotary`, `embedding` and `shape.block`.
        layer_input: input of the first layer.
        lm_head: output matrix; a packed one is shared. None = the target's, which native code does not support.
        norm: norm before the output matrix. Default None = no norm.
        has_normed_output: whether the next feature is the state after `norm`, otherwise before it. Default False.

    Returns:
        The layers; None if the output matrix or a layer is not supported.
    """
    layers, embedding = list(network.layers), network.embedding
    if lm_head is None or explain_unsupported(layers, embedding) is not None:
        return None
    return NativeDraftLayers.from_layers(
        layers, layer_input, norm, has_normed_output, embedding, lm_head, network.shape.block, network.rotary
    )
