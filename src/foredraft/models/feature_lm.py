"""Language model of EAGLE-like drafters: from (token, feature) pairs to logits and the next features."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foredraft.kv.pool import KVPool
from foredraft.models.attention import paged_attention
from foredraft.models.draft_layer import AttentionFunction
from foredraft.models.forward_batch import AFTER_FINAL_NORM, ForwardBatch
from foredraft.models.padded_rows import PaddedRows
from foredraft.models.pass_size import PassSize
from foredraft.models.recorded_pass import RecordedPasses


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
    recorded: RecordedPasses = field(init=False)
    _inputs: dict[PassSize, Tensor] = field(default_factory=dict)  # features [T, H] that a recording reads

    def __post_init__(self) -> None:
        self.recorded = RecordedPasses("the draft network", self.pool)

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
        outputs = self._run_recorded(forward_batch, features)
        return self._run(forward_batch, features) if outputs is None else outputs

    def _run_recorded(self, batch: ForwardBatch, features: Tensor) -> tuple[Tensor, Tensor] | None:
        """Run a pass by a recording; None if there is none."""
        if self.pool.recorder is None or batch.made_rows is not None:
            return None
        size = PassSize.fit(batch)
        if size is None:
            return None
        if size not in self._inputs:
            self._inputs[size] = features.new_zeros(size.rows, features.shape[1], dtype=self.dtype)
        inputs = self._inputs[size]
        inputs[: len(features)] = features
        outputs = self.recorded.run(batch, (AFTER_FINAL_NORM,), lambda rows, _: self._run(rows, inputs))
        if outputs is None:
            return None
        logits, next_features = outputs
        assert next_features is not None
        return logits.clone(), next_features  # drafters keep the logits of a root beyond the next pass

    def _run(self, forward_batch: ForwardBatch | PaddedRows, features: Tensor) -> tuple[Tensor, Tensor]:
        """Run the modules of the network; see `forward`."""

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
