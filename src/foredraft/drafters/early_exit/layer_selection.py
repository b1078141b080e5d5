"""Choice of the exit layer: the one with the best estimated speed from agreement with the target and cost.

The hidden states of the target's own passes show what a draft from any layer would have been, since accepted nodes have
the same keys and values in both. So all candidate layers are measured together on emitted tokens, first for 64 tokens
and again every 1,024. No time is measured; a choice depends on earlier steps alone, so it is reproducible.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from foredraft.drafters.common.last_hidden_state import make_packed_linear
from foredraft.drafters.common.target_access import get_packed_lm_head
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.models.truncated import count_weights
from foredraft.models.truncated_modules import find_final_norm
from foredraft.request import Batch, Request
from foredraft.tree import Commit

LAYER_FRACTIONS = (1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3)  # candidates, as shares of the target's layers
INITIAL_FRACTION = 1 / 4  # share of the layers before the first measurement
MEASURED_TOKENS = 64  # tokens per measurement
MEASURE_INTERVAL_TOKENS = 1024  # tokens emitted by drafting steps between two measurements
MAX_ROWS_PER_STEP = 16  # maximum tokens measured in one step
EVIDENCE_DECAY = 0.5  # factor on earlier counts at every new measurement
PRIOR_HITS, PRIOR_TOKENS = 1.0, 2.0  # agreement before the first measurement: one of two tokens
MIN_TEMPERATURE = 1e-3  # floor before a division


class ExitLayerSelector(Protocol):
    """Policy for the number of target layers that draft."""

    @property
    def layer(self) -> int:
        """Layers to run in the next draft."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layer boundaries of the target whose states the next `observe` needs."""

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Read the result of a step; called after every forward pass of the target."""


@dataclass(frozen=True)
class FixedExitLayer:
    """Policy with one layer that never changes."""

    layer: int
    hidden_layers: tuple[int, ...] = ()

    def observe(self, batch: Batch, commit: Commit) -> None:
        """Do nothing."""


@dataclass
class LayerAgreement:
    """Estimated acceptance rate of a draft token from each candidate layer, as decayed counts."""

    hits: list[float]  # by candidate
    num_observed: float = PRIOR_TOKENS

    @classmethod
    def from_prior(cls, count: int) -> "LayerAgreement":
        """Make the estimate of `count` candidates before any measurement."""
        return cls([PRIOR_HITS] * count)

    def add(self, hits: Sequence[float], num_observed: int) -> None:
        """Add the hits of each candidate on `num_observed` tokens."""
        self.hits = [old + new for old, new in zip(self.hits, hits, strict=True)]
        self.num_observed += num_observed

    def decay(self) -> None:
        """Reduce the weight of earlier tokens."""
        self.hits = [EVIDENCE_DECAY * old for old in self.hits]
        self.num_observed *= EVIDENCE_DECAY

    @property
    def rates(self) -> list[float]:
        """Acceptance rate of each candidate."""
        return [hit / self.num_observed for hit in self.hits]


@dataclass
class MeasuredExitLayer:
    """Policy that measures the agreement of C candidate layers with the target, and picks the fastest."""

    costs: Mapping[int, float]  # candidate layer -> draft cost of one token, in forward passes of the target
    max_draft_size: tuple[int, int]  # maximum depth and number of nodes of a draft
    compute_logits: Callable[[Tensor], Tensor]  # states [R, C + 1, H] of candidates, then target -> [R, C + 1, V]
    layer: int
    agreement: LayerAgreement = field(init=False)
    _tokens_left: int = MEASURED_TOKENS  # tokens left in this measurement; 0 = none runs
    _tokens_since_measurement: int = 0  # tokens emitted by drafting steps since the last measurement
    _had_full_budget: bool = True  # whether every draft since then had its full budget

    def __post_init__(self) -> None:
        self.agreement = LayerAgreement.from_prior(len(self.costs))

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (*self.costs, AFTER_FINAL_NORM) if self._tokens_left else ()

    def observe(self, batch: Batch, commit: Commit) -> None:
        drafting = batch.find_drafting()
        self._had_full_budget &= all(
            batch.granted_nodes[b] >= min(self.max_draft_size[1], batch.requests[b].max_draft_depth) for b in drafting
        )
        if not self._tokens_left:
            self._tokens_since_measurement += sum(commit.counts[b] for b in drafting)
            if self._tokens_since_measurement >= MEASURE_INTERVAL_TOKENS:
                self._tokens_left = MEASURED_TOKENS
                self.agreement.decay()
        elif commit.features is not None:
            self._measure(batch, commit, commit.features)

    def _measure(self, batch: Batch, commit: Commit, features: Tensor) -> None:
        rows = _list_emitted(batch, commit)[: min(MAX_ROWS_PER_STEP, self._tokens_left)]
        if not rows:
            return
        states = torch.stack([features[b, i] for b, i, _, _ in rows]).view(len(rows), len(self.costs) + 1, -1)
        hits = _estimate_agreement(
            self.compute_logits(states), [request for _, _, request, _ in rows], [token for *_, token in rows]
        )
        self.agreement.add(hits.sum(0).tolist(), len(rows))
        self._tokens_left -= len(rows)
        if not self._tokens_left:
            self._select_layer()

    def _select_layer(self) -> None:
        depth = self.max_draft_size[0]
        speeds = [
            estimate_speed(rate, cost, depth, self._had_full_budget)
            for rate, cost in zip(self.agreement.rates, self.costs.values(), strict=True)
        ]
        self.layer = max(zip(speeds, self.costs, strict=True), key=lambda pair: (pair[0], -pair[1]))[1]
        self._tokens_since_measurement, self._had_full_budget = 0, True


def estimate_speed(acceptance_rate: float, cost: float, max_length: int, is_fixed: bool = False) -> float:
    """Estimate tokens per time of a target pass, as a multiple of plain decoding.

    All draft tokens are assumed to have the same acceptance rate (2211.17192, section 3.3).

    Args:
        acceptance_rate: alpha, 0 to 1.
        cost: draft cost of one token, in forward passes of the target.
        max_length: maximum draft length K.
        is_fixed: whether every draft has the maximum length; otherwise the best length is taken.
    """
    tokens, best = 1.0, 1.0
    for length in range(1, max_length + 1):
        tokens += acceptance_rate**length
        speed = tokens / (1.0 + length * cost)
        best = speed if is_fixed else max(best, speed)
    return best


def create_layer_selector(target: HFModel, max_draft_size: tuple[int, int]) -> ExitLayerSelector:
    """Make the policy for a target.

    It is fixed if there is only one candidate, or if the target's final norm cannot be found.
    """
    layers, norm = target.num_layers, find_final_norm(target.model)
    candidates = sorted({min(max(1, round(fraction * layers)), layers - 1) for fraction in LAYER_FRACTIONS})
    initial = min(max(1, round(INITIAL_FRACTION * layers)), layers - 1)
    if len(candidates) == 1 or norm is None:
        return FixedExitLayer(initial)
    costs = {layer: estimate_cost(target, layer) for layer in candidates}
    return MeasuredExitLayer(costs, max_draft_size, _make_logits_function(target, norm), initial)


def estimate_cost(target: HFModel, layers: int) -> float:
    """Estimate the draft cost of the first layers: the weights they read, as a share of a whole forward pass."""
    layer, head = count_weights(target)
    return (layers * layer + head) / (target.num_layers * layer + head)


def _make_logits_function(target: HFModel, norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """Make the function from states [R, C + 1, H] to logits; the last state has passed the final norm already."""
    head = get_packed_lm_head(target)
    compute_logits = target.compute_logits if head is None else make_packed_linear(head)

    def compute(states: Tensor) -> Tensor:
        normed = torch.cat([norm(states[:, :-1]), states[:, -1:]], 1)
        logits: Tensor = compute_logits(normed.flatten(0, 1))
        return logits.view(*states.shape[:2], -1)

    return compute


def _list_emitted(batch: Batch, commit: Commit) -> list[tuple[int, int, Request, int]]:
    """List (batch index, path position, request, token) of every token that this step emitted."""
    return [
        (b, i, request, tokens[i])
        for b, (request, chunk, tokens) in enumerate(
            zip(batch.requests, batch.num_new_tokens, commit.tokens, strict=True)
        )
        if request.num_computed + chunk == request.num_tokens
        for i in range(chunk - 1, len(tokens))
    ]


def _estimate_agreement(logits: Tensor, requests: Sequence[Request], tokens: Sequence[int]) -> Tensor:
    """Estimate the probability that the target accepts a draft token of each candidate.

    For greedy requests it is 1 if the candidate's argmax is the emitted token, else 0. Otherwise it is one minus the
    total variation distance of the two distributions at the request's temperature.

    Args:
        logits: [R, C + 1, V], the target's last.
        requests: request of each row.
        tokens: emitted token of each row.

    Returns:
        Probabilities [R, C].
    """
    emitted = torch.tensor(tokens, device=logits.device)
    samplings = [r.spec.sampling for r in requests]
    scales = [max(s.temperature, MIN_TEMPERATURE) for s in samplings]
    temperatures = torch.tensor(scales, dtype=torch.float32, device=logits.device)
    probs = (logits.float() / temperatures[:, None, None]).softmax(-1)
    overlap = torch.minimum(probs[:, :-1], probs[:, -1:]).sum(-1)
    is_hit = (logits[:, :-1].argmax(-1) == emitted[:, None]).to(overlap.dtype)
    is_greedy = torch.tensor([s.is_greedy for s in samplings], device=logits.device)
    return torch.where(is_greedy[:, None], is_hit, overlap)
