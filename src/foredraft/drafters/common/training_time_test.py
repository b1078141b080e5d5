"""Training-time test: training a feature drafter on its own outputs (EAGLE-3, 2503.01840; HASS, 2408.15766).

Step k simulates, at every position i, a draft of k tokens after pair i with a target feature. It reads token i + 1 + k
with the network's own output of step k - 1. It attends to the target-feature pairs up to i and to its k later pairs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.losses import Losses, Trace, average_losses, average_over_mask, compute_draft_loss
from foredraft.models.feature_lm import FeatureNetwork


@dataclass(frozen=True)
class UnrolledStep:
    """Outputs of one step at n positions; position i predicts token i + 2 + index."""

    index: int  # k, from 0
    logits: Tensor  # [B, n, W]
    features: Tensor  # [B, n, H] predicted features
    trace: Trace

    @property
    def _rows(self) -> slice:
        return slice(self.index + 1, self.index + 1 + self.features.shape[1])

    @property
    def target_rows(self) -> tuple[slice, slice]:
        """Index of the target's distributions for the same tokens in the trace."""
        return slice(None), self._rows

    @property
    def tokens(self) -> Tensor:
        """Tokens [B, n] that this step predicts."""
        return self.trace.tokens[:, self._rows.start + 1 : self._rows.stop + 1]

    @property
    def mask(self) -> Tensor:
        """Mask [B, n] of the tokens to train on."""
        return self.trace.mask[:, self._rows.start + 1 : self._rows.stop + 1]

    def compute_losses(self, name: str, logits: Tensor | None = None) -> Tensor:
        """Compute the losses [B, n] of the tokens that this step predicts.

        Args:
            name: loss, one of `losses.LOSS_NAMES`.
            logits: logits [B, n, V] in place of those of the step, which may have fewer tokens.
        """
        log_probs = self.trace.target_log_probs.select(self.target_rows)
        return compute_draft_loss(name, self.logits if logits is None else logits, log_probs, self.tokens)

    @property
    def true_features(self) -> Tensor:
        """Target states [B, n, F] that this step's features approximate."""
        return self.trace.features[:, self._rows]


@dataclass
class UnrolledAttention:
    """Attention over the keys and values of all steps so far. Step 0 has the pairs with target features."""

    kv_by_step: list[dict[int, tuple[Tensor, Tensor]]] = field(default_factory=list)  # by step and layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the newest step's positions i to step 0 up to i, and to position i of each later step."""
        self.kv_by_step[-1][layer] = (key, value)
        length, groups = query.shape[1], query.shape[2] // key.shape[2]
        q = query.view(*query.shape[:2], -1, groups, query.shape[3]) * query.shape[-1] ** -0.5  # [B, n, Hkv, G, D]
        keys, values = (x[:, :length] for x in self.kv_by_step[0][layer])
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q, keys)
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        later = [tuple(x[:, :length] for x in step[layer]) for step in self.kv_by_step[1:]]
        columns = [torch.einsum("bqhgd,bqhd->bhgq", q, k)[..., None] for k, _ in later]
        weights = torch.cat([scores, *columns], -1).float().softmax(-1).to(value.dtype)
        out = torch.einsum("bhgqk,bkhd->bqhgd", weights[..., :length], values)
        for i, (_, v) in enumerate(later):
            out = out + torch.einsum("bhgq,bqhd->bqhgd", weights[..., length + i], v)
        return out.flatten(2, 3)


@dataclass(frozen=True)
class MaskedPair:
    """Token and feature that stand for a draft token of parallel drafts (P-EAGLE, 2602.01469)."""

    token: int
    feature: Tensor  # [1, H]


def unroll(
    network: FeatureNetwork, trace: Trace, first: Tensor, steps: int, mask: MaskedPair | None = None
) -> Iterator[UnrolledStep]:
    """Run the network for `steps` steps on its own outputs, or on masks.

    Args:
        network: draft network.
        trace: sequences and target outputs.
        first: target features [B, L, H] after `project_features`; the input of step 0.
        steps: maximum number of steps; short sequences end earlier.
        mask: what later steps read in place of the next token and the network's output; None = these.
    """
    attention, features = UnrolledAttention(), first
    tokens, device = trace.tokens, trace.tokens.device
    for index in range(steps):
        length = first.shape[1] - 1 - index
        if length < 1:
            return
        attention.kv_by_step.append({})
        positions = torch.arange(index, index + length, device=device).expand(len(tokens), -1)
        inputs = tokens[:, index + 1 : index + 1 + length]
        if mask is not None and index:
            inputs, features = torch.full_like(inputs, mask.token), mask.feature.expand_as(first)
        states, features = network(inputs, features[:, :length], positions, attention.attend)
        yield UnrolledStep(index, network.compute_logits(states), features, trace)


def average_step_losses(
    steps: Iterable[UnrolledStep], compute_losses: Callable[[UnrolledStep], Tensor], decay: float
) -> Losses:
    """Average the losses of all steps; step k has the weight decay^k.

    Args:
        steps: steps in order.
        compute_losses: computes the losses [B, n] of the tokens of a step.
        decay: factor of the weights.
    """
    return average_losses((average_over_mask(compute_losses(step), step.mask) for step in steps), decay)
