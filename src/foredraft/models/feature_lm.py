"""A drafter's layer over the states of a target, as an LM: (token, feature) pairs in, logits and features out."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.models.attention import paged_attention
from foredraft.models.draft_layer import AttentionFunction
from foredraft.models.forward_batch import ForwardBatch


class FeatureNetwork(Protocol):
    """EAGLE's network and its like."""

    def project_features(self, features: Tensor) -> Tensor:
        """[.., F] states of the target as the layer takes features in, [.., H]."""

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """[B, L] tokens, each with the feature [B, L, H] before it -> the states that logits are made of, and the next
        features, [B, L, H] each."""

    def compute_logits(self, states: Tensor) -> Tensor:
        """[.., H] -> [.., W]."""


class NativeFeatureNetwork(Protocol):
    """The same network as one native call."""

    def forward(self, forward_batch: ForwardBatch, pool: KVPool, features: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class _LayerIndex:
    layer_idx: int


@dataclass
class FeatureLM:
    """Runs a network over paged KV. Position t of its memory holds the pair of token t + 1 and feature t."""

    network: FeatureNetwork
    dtype: torch.dtype
    pool: KVPool = field(default_factory=KVPool)
    fused: NativeFeatureNetwork | None = None
    sliding_windows: tuple[int | None, ...] = ()  # by layer: positions a row sees at most; () = all

    def project_features(self, features: Tensor) -> Tensor:
        """[T, F] states of the target -> [T, H] features."""
        return self.network.project_features(features.to(self.dtype))

    def forward(self, forward_batch: ForwardBatch, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, W] of the rows asked for, and the next features [T, H], from features [T, H]."""
        if self.fused is not None:
            return self.fused.forward(forward_batch, self.pool, features)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            sliding, place = self.sliding_windows[layer] if self.sliding_windows else None, _LayerIndex(layer)
            return paged_attention(
                place,  # type: ignore[arg-type]
                q, k, v, None, sliding_window=sliding, forward_batch=forward_batch, pool=self.pool,
            )[0]  # fmt: skip

        states, following = self.network(
            forward_batch.tokens, features.to(self.dtype)[None], forward_batch.positions, attend
        )
        return self.network.compute_logits(states[0, forward_batch.logit_rows]), following[0]
