"""A drafter's layer over the states of a target, as an LM: (token, feature) pairs in, logits and features out."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.models.attention import paged_attention
from foredraft.models.block import Attend
from foredraft.models.window import Window


class FeatureNetwork(Protocol):
    """EAGLE's network and its like."""

    def taken(self, features: Tensor) -> Tensor:
        """[.., F] states of the target as the layer takes features in, [.., H]."""

    def __call__(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """[B, L] tokens, each with the feature [B, L, H] before it -> the states that logits are made of, and the next
        features, [B, L, H] each."""

    def logits(self, states: Tensor) -> Tensor:
        """[.., H] -> [.., W]."""


class NativeFeatures(Protocol):
    """The same network as one native call."""

    def forward(self, window: Window, pool: KVPool, features: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class _Place:
    layer_idx: int


@dataclass
class FeatureLM:
    """Runs a network over paged KV. Position t of its memory holds the pair of token t + 1 and feature t."""

    network: FeatureNetwork
    dtype: torch.dtype
    pool: KVPool = field(default_factory=KVPool)
    fused: NativeFeatures | None = None
    windows: tuple[int | None, ...] = ()  # by layer: positions a row sees at most; () = all

    def taken(self, features: Tensor) -> Tensor:
        """[T, F] states of the target -> [T, H] features."""
        return self.network.taken(features.to(self.dtype))

    def forward(self, window: Window, features: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [R, W] of the rows asked for, and the next features [T, H], from features [T, H]."""
        if self.fused is not None:
            return self.fused.forward(window, self.pool, features)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            sliding, place = self.windows[layer] if self.windows else None, _Place(layer)
            return paged_attention(place, q, k, v, None, sliding_window=sliding, window=window, pool=self.pool)[0]  # type: ignore[arg-type]

        states, following = self.network(window.tokens, features.to(self.dtype)[None], window.positions, attend)
        return self.network.logits(states[0, window.logit_rows]), following[0]
