"""Language model of EAGLE-like drafters: from (token, feature) pairs to logits and the next features."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.models.attention import paged_attention
from foredraft.models.draft_layer import AttentionFunction
from foredraft.models.forward_batch import ForwardBatch


class FeatureNetwork(Protocol):
    """Network that predicts the target's next hidden state from a token and a feature, such as EAGLE's."""

    def project_features(self, features: Tensor) -> Tensor:
        """Project hidden states of the target [.., F] to the network's features [.., H]."""

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: AttentionFunction
    ) -> tuple[Tensor, Tensor]:
        """Predict from tokens [B, L] and the features [B, L, H] of the positions before them.

        Args:
            tokens: token ids [B, L].
            features: features [B, L, H]; the feature beside a token is of the position before it.
            positions: positions [B, L].
            attend: attention function.

        Returns:
            The states for `compute_logits` and the next features, [B, L, H] each.
        """

    def compute_logits(self, states: Tensor) -> Tensor:
        """Compute logits [.., W] over the W tokens of the draft vocabulary from states [.., H]."""


class NativeFeatureNetwork(Protocol):
    """FeatureNetwork over paged KV that runs as one native call."""

    def forward(self, forward_batch: ForwardBatch, pool: KVPool, features: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class _LayerIndex:
    """Stand-in for a transformers attention module, of which `paged_attention` reads the layer index only."""

    layer_idx: int


@dataclass
class FeatureLM:
    """A FeatureNetwork over paged KV. Position t of its KV cache holds the pair (token t + 1, feature t)."""

    network: FeatureNetwork
    dtype: torch.dtype  # of the network's weights
    pool: KVPool = field(default_factory=KVPool)
    fused: NativeFeatureNetwork | None = None  # native version of `network`, used instead of it
    # By layer: maximum number of positions that a row sees, its own included; None or () = all.
    sliding_windows: tuple[int | None, ...] = ()

    def project_features(self, features: Tensor) -> Tensor:
        """Project hidden states of the target [T, F] to features [T, H]."""
        return self.network.project_features(features.to(self.dtype))

    def forward(self, forward_batch: ForwardBatch, features: Tensor) -> tuple[Tensor, Tensor]:
        """Run one forward pass.

        Args:
            forward_batch: packed tokens of the pairs.
            features: features [T, H] of the pairs.

        Returns:
            Logits [R, W] of the batch's logit rows over the draft vocabulary, and the next features [T, H].
        """
        if self.fused is not None:
            return self.fused.forward(forward_batch, self.pool, features)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (query, key, value))
            window, index = self.sliding_windows[layer] if self.sliding_windows else None, _LayerIndex(layer)
            return paged_attention(
                index,  # type: ignore[arg-type]
                q, k, v, None, sliding_window=window, forward_batch=forward_batch, pool=self.pool,
            )[0]  # fmt: skip

        states, next_features = self.network(
            forward_batch.tokens, features.to(self.dtype)[None], forward_batch.positions, attend
        )
        return self.network.compute_logits(states[0, forward_batch.logit_rows]), next_features[0]
