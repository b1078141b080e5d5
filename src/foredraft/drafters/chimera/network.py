"""Chimera's network (2402.15758): a trigram encoder, a context encoder of one decoder layer, residual decoding heads.

Every token has a state: the target's if the target has computed it, otherwise the trigram encoder's output for the
token and the two before it. The context encoder joins token and state, and attends to all earlier positions. Head k
predicts draft token k + 1 from its output and from the target's newest state.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.drafters.chimera.checkpoint import ChimeraShape
from foredraft.drafters.common.last_hidden_state import LinearFactory, make_packed_linear
from foredraft.drafters.common.native_layers import make_native_layers
from foredraft.drafters.common.target_access import get_packed_lm_head
from foredraft.models.draft_layer import AttentionFunction, DraftLayer, RMSNorm, RotaryEmbedding
from foredraft.models.hf import HFModel
from foredraft.models.native.draft_layers import JoinedInput, NativeDraftLayers

TRIGRAM_TOKENS = 3  # tokens that the trigram encoder reads
MAX_TABLE_BYTES = 64 << 20  # maximum size of the table of each token's contribution to a trigram


class ChimeraNetwork(nn.Module):
    """Network of Chimera. Its tensors have the names that ChimeraShape documents."""

    def __init__(self, shape: ChimeraShape, target: HFModel) -> None:
        super().__init__()
        block, hidden = shape.block, shape.block.hidden
        self.shape = shape
        self.target = (target,)  # in a tuple, so that its weights are not registered here
        if shape.has_fc:
            self.fc = nn.Linear(len(shape.hidden_layers) * hidden, hidden, bias=False)
        self.trigram = nn.Linear(TRIGRAM_TOKENS * hidden, hidden, bias=False)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DraftLayer(block)])
        self.heads = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(shape.num_heads))
        self.norm = RMSNorm(hidden, block.eps)
        self.rotary = RotaryEmbedding(block)
        self.embedding = target.embedding  # [V, H]

    def project_features(self, features: Tensor) -> Tensor:
        """Project concatenated target states [.., F] to [.., H]."""
        return self.fc(features) if self.shape.has_fc else features

    def look_up_embeddings(self, tokens: Tensor) -> Tensor:
        """Return embeddings [.., H] in the dtype of the network."""
        return F.embedding(tokens, self.embedding).to(self.join.weight.dtype)

    def encode_trigrams(self, trigrams: Tensor) -> Tensor:
        """Compute states [.., H] that replace the target's, from trigrams [.., 3] of tokens, oldest first."""
        return F.silu(self.trigram(self.look_up_embeddings(trigrams).flatten(-2)))

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """Run the context encoder on tokens [B, L] with states [B, L, H].

        Returns:
            Its output [B, L, H] twice, as a FeatureNetwork returns states and features.
        """
        x = self.join(torch.cat([self.look_up_embeddings(tokens), states], -1))
        x = self.layers[0](x, self.rotary(positions, x.dtype), 0, attend)
        return x, x

    def apply_head(self, depth: int, encoded: Tensor, newest: Tensor) -> Tensor:
        """Compute the input [.., H] of the target's output matrix for the token after `depth` draft tokens."""
        head = self.heads[min(depth, self.shape.num_heads - 1)]
        return self.norm(encoded + F.silu(head(torch.cat([encoded, newest], -1))))  # type: ignore[no-any-return]

    def compute_logits(self, states: Tensor) -> Tensor:
        """Compute logits [.., V] from the output of `apply_head`."""
        return self.target[0].compute_logits(states.to(self.embedding.dtype))

    def make_native(self) -> NativeDraftLayers | None:
        """Convert the context encoder to native code, which takes over its weights. None if that is unsupported."""
        return make_native_layers(self, JoinedInput(self.join), get_packed_lm_head(self.target[0]))


class ChimeraHeadRunner:
    """Trigram encoder and heads for drafting: packed matrix products, norms in float32 or wider."""

    def __init__(self, network: ChimeraNetwork, linears: LinearFactory) -> None:
        self.network = network
        self.dtype = torch.float32 if linears.is_native else linears.dtype  # dtype of the states
        self.norm_dtype = torch.promote_types(linears.dtype, torch.float32)
        size, hidden = network.embedding.shape
        self.uses_table = (
            linears.is_native and TRIGRAM_TOKENS * size * hidden * torch.float32.itemsize <= MAX_TABLE_BYTES
        )
        self.trigram = self._make_table_lookup() if self.uses_table else self._make_trigram_linear(linears)
        self.fc = linears.make(network.fc.weight.detach()) if network.shape.has_fc else None
        self.heads = [linears.make(head.weight.detach(), head.bias.detach()) for head in _list_linears(network.heads)]
        packed = get_packed_lm_head(network.target[0]) if linears.is_native else None
        self.output: Callable[[Tensor], Tensor] = (
            network.compute_logits if packed is None else make_packed_linear(packed)
        )
        self.scale = network.norm.weight.detach().to(self.norm_dtype)

    def project_features(self, features: Tensor) -> Tensor:
        """Project target states [R, F] to [R, H]."""
        return features.to(self.dtype) if self.fc is None else self.fc(features).to(self.dtype)

    def encode_trigrams(self, trigrams: Sequence[Sequence[int]]) -> Tensor:
        """Compute states [R, H] that replace the target's, from R trigrams."""
        return F.silu(self.trigram(trigrams)).to(self.dtype)

    def _make_table_lookup(self) -> Callable[[Sequence[Sequence[int]]], Tensor]:
        """Precompute what each token contributes at each of the three positions; a trigram is a sum of three rows."""
        embedding, weight = self.network.embedding.float(), self.network.trigram.weight.detach().float()
        table = torch.cat([embedding @ block.T for block in weight.chunk(TRIGRAM_TOKENS, 1)])  # [3 V, H]
        size = len(embedding)

        def look_up(trigrams: Sequence[Sequence[int]]) -> Tensor:
            ids = torch.tensor([[a, b + size, c + 2 * size] for a, b, c in trigrams])
            return F.embedding_bag(ids, table, mode="sum")

        return look_up

    def _make_trigram_linear(self, linears: LinearFactory) -> Callable[[Sequence[Sequence[int]]], Tensor]:
        embedding, product = self.network.embedding, linears.make(self.network.trigram.weight.detach())
        return lambda trigrams: product(
            F.embedding(torch.tensor(trigrams, device=embedding.device), embedding).flatten(1)
        )

    def __call__(self, depth: int, encoded: Tensor, newest: Tensor) -> Tensor:
        """Compute logits [R, V] of head `depth` from context states [R, H] and the newest target states [R, H]."""
        head = self.heads[min(depth, len(self.heads) - 1)]
        encoded = encoded.to(self.norm_dtype)
        mixed = encoded + F.silu(head(torch.cat([encoded, newest.to(self.norm_dtype)], -1)).to(self.norm_dtype))
        return self.output(F.rms_norm(mixed, mixed.shape[-1:], self.scale, self.network.norm.eps))


def _list_linears(modules: nn.ModuleList) -> list[Any]:
    return list(modules)


def build_trigrams(tokens: Tensor) -> Tensor:
    """Return trigrams [B, L, 3] of tokens [B, L], oldest first; missing tokens repeat the first of the sequence."""
    offsets = torch.arange(1 - TRIGRAM_TOKENS, 1, device=tokens.device)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[:, None] + offsets
    return tokens[:, positions.clamp_min(0)]
