"""Training a recurrent drafter on its own outputs: EAGLE-3's training-time test (2503.01840), after HASS (2408.15766).

Step k drafts from position i as if k tokens had been drafted since the true pair i: it reads token i + 1 + k with its
own output of step k - 1, and attends to the true pairs up to i and to its own k pairs after them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foredraft.drafters.training import Trace
from foredraft.models.feature_lm import FeatureNetwork


@dataclass(frozen=True)
class Step:
    """One step's outputs at n positions; row i predicts token i + 2 + index."""

    index: int
    logits: Tensor  # [B, n, W]
    features: Tensor  # [B, n, H]
    trace: Trace

    @property
    def _rows(self) -> slice:
        return slice(self.index + 1, self.index + 1 + self.features.shape[1])

    @property
    def law_rows(self) -> tuple[slice, slice]:
        """Where in the trace's law the target's own law for the same tokens stands."""
        return slice(None), self._rows

    @property
    def tokens(self) -> Tensor:
        """[B, n] the tokens predicted."""
        return self.trace.tokens[:, self._rows.start + 1 : self._rows.stop + 1]

    @property
    def mask(self) -> Tensor:
        """[B, n] those to learn."""
        return self.trace.mask[:, self._rows.start + 1 : self._rows.stop + 1]

    @property
    def true_features(self) -> Tensor:
        """[B, n, F] what the target's states turned out to be where this step's outputs stand for them."""
        return self.trace.features[:, self._rows]


@dataclass
class UnrolledAttention:
    """Attention of the steps so far; keys and values of step 0 are the true pairs'."""

    held: list[dict[int, tuple[Tensor, Tensor]]] = field(default_factory=list)  # by step and layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.held[-1][layer] = (key, value)
        length, groups = query.shape[1], query.shape[2] // key.shape[2]
        q = query.view(*query.shape[:2], -1, groups, query.shape[3]) * query.shape[-1] ** -0.5  # [B, n, Hkv, G, D]
        keys, values = (x[:, :length] for x in self.held[0][layer])
        scores = torch.einsum("bqhgd,bkhd->bhgqk", q, keys)
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        own = [tuple(x[:, :length] for x in step[layer]) for step in self.held[1:]]
        columns = [torch.einsum("bqhgd,bqhd->bhgq", q, k)[..., None] for k, _ in own]
        weights = torch.cat([scores, *columns], -1).float().softmax(-1).to(value.dtype)
        out = torch.einsum("bhgqk,bkhd->bqhgd", weights[..., :length], values)
        for i, (_, v) in enumerate(own):
            out = out + torch.einsum("bhgq,bqhd->bqhgd", weights[..., length + i], v)
        return out.flatten(2, 3)


def unroll(network: FeatureNetwork, trace: Trace, first: Tensor, steps: int) -> Iterator[Step]:
    """`steps` steps from first [B, L, H], the target's states as the network takes them in."""
    attention, features = UnrolledAttention(), first
    tokens, device = trace.tokens, trace.tokens.device
    for index in range(steps):
        length = first.shape[1] - 1 - index
        if length < 1:
            return
        attention.held.append({})
        positions = torch.arange(index, index + length, device=device).expand(len(tokens), -1)
        read = tokens[:, index + 1 : index + 1 + length]
        states, features = network(read, features[:, :length], positions, attention.attend)
        yield Step(index, network.logits(states), features, trace)


Weigh = Callable[[Step], Tensor]


def weighted(steps: Iterator[Step], loss_of: Weigh, decay: float) -> tuple[Tensor, dict[str, float]]:
    """The sum of decay^k times every step's loss over the sum of the weights, and the losses one by one."""
    total, weight, parts = torch.zeros(()), 0.0, {}
    for step in steps:
        loss, share = loss_of(step), decay**step.index
        total, weight = total.to(loss.device) + share * loss, weight + share
        parts[f"loss_{step.index + 1}"] = float(loss.detach())
    return total / max(weight, 1e-9), parts
