"""DFlash on native CPU code: one call runs all layers over the blocks, and one product makes the context rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.common.last_hidden_state import HeadLinear, make_packed_linear
from foredraft.drafters.common.target_access import get_packed_lm_head
from foredraft.drafters.dflash.network import DFlashNetwork, KeysAndValues
from foredraft.kernels.arena import Arena
from foredraft.kernels.linear import PackedWeight
from foredraft.kv.pool import KVPool
from foredraft.models.draft_layer import apply_rotary
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch
from foredraft.models.native.draft_layers import NativeDraftLayers, TokenInput, explain_unsupported
from foredraft.models.span import Span
from foredraft.request import Request


class NativeBlock:
    """Layers of a DFlash network in the native layout.

    Args:
        network: the network; it keeps its norms, and gives up the matrices of its layers.
        layers: its layers.
        project: `fc` as a native product.
        project_rows: keys and values of all layers as one native product.
    """

    def __init__(
        self, network: DFlashNetwork, layers: NativeDraftLayers, project: HeadLinear, project_rows: HeadLinear
    ) -> None:
        self.network = network
        self.layers = layers
        self._project, self._project_rows = project, project_rows

    @classmethod
    def from_network(cls, network: DFlashNetwork) -> "NativeBlock | None":
        """Pack a network; None if the target or a layer is not supported.

        The layers of a native call see the same rows, so heads of causal and other layers are not supported.
        """
        shape, layers = network.shape, list(network.layers)
        lm_head = get_packed_lm_head(network.target[0])
        is_mixed = len({shape.is_causal(i) for i in range(shape.num_layers)}) > 1
        if lm_head is None or is_mixed or explain_unsupported(layers, network.embedding) is not None:
            return None
        arena = Arena()
        project = make_packed_linear(PackedWeight.pack(network.fc.weight.detach(), None, arena))
        attentions: list[Any] = [layer.self_attn for layer in layers]
        projections = [p for attention in attentions for p in (attention.k_proj, attention.v_proj)]
        bias = torch.cat([p.bias.detach() for p in projections]) if shape.block.has_qkv_bias else None
        weight = torch.cat([p.weight.detach() for p in projections])
        project_rows = make_packed_linear(PackedWeight.pack(weight, bias, arena))
        network.native_head = make_packed_linear(lm_head)
        if network.markov_head is not None:
            w2 = network.markov_head.markov_w2.weight.detach()
            network.markov_head.native_w2 = make_packed_linear(PackedWeight.pack(w2, None, arena))
        native = NativeDraftLayers.from_layers(
            layers, TokenInput(), network.norm, True, network.embedding, lm_head, shape.block, network.rotary
        )
        return cls(network, native, project, project_rows)

    def compute_context(self, states: Tensor, positions: Tensor) -> list[KeysAndValues]:
        """Compute keys and values as `DFlashNetwork.compute_context` does."""
        network, block = self.network, self.network.shape.block
        dtype = network.fc.weight.dtype
        x = network.hidden_norm(self._project(states[0].to(dtype)).to(dtype))
        rows = self._project_rows(x).to(dtype).view(1, len(x), network.shape.num_layers, 2, block.kv_heads, -1)
        rotary, context = network.rotary(positions, dtype), []
        layers: list[Any] = list(network.layers)
        for i, layer in enumerate(layers):
            keys, values = rows[:, :, i].unbind(2)
            if block.has_qk_norm:
                keys = layer.self_attn.k_norm(keys)
            context.append((apply_rotary(keys, rotary), values))
        return context

    def compute_states(self, requests: Sequence[Request], pool: KVPool, page_size: int, num_pages: int) -> Tensor:
        """Compute the states [n, S, H] of one block after each of n requests.

        The rows of a block are written to the slots after the committed tokens, where later context rows replace them,
        and to pages that no request has where those end.

        Args:
            requests: requests whose context rows are all written.
            pool: pool of the context rows.
            page_size: slots per page.
            num_pages: pages of the pool that hold context rows: ids below this.
        """
        size, mask = self.network.shape.block_size, self.network.shape.mask_token_id
        next_page = max(num_pages, *(max(request.pages) + 1 for request in requests))
        spans = []
        for request in requests:
            start = request.num_tokens - 1
            num_block_pages = -(-(start + size) // page_size)
            num_missing = max(num_block_pages - len(request.pages), 0)
            pages = [*request.pages[:num_block_pages], *range(next_page, next_page + num_missing)]
            next_page += num_missing
            spans.append(Span(pages, start, [request.get_token(start)] + [mask] * (size - 1), range(size)))
        is_causal = self.network.shape.is_causal(0)
        ahead = [0 if is_causal else size - 1 - row for _ in spans for row in range(size)]
        batch = ForwardBatch.build(spans, (), page_size, "cpu")
        _, states = self.layers.decoder.run(batch, pool, (AFTER_FINAL_NORM,), ahead=ahead)
        assert states is not None
        return states.view(len(spans), size, -1).to(self.network.fc.weight.dtype)
