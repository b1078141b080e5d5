"""Optimizers and learning-rate schedule: AdamW, or Muon for the matrices between hidden states."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import ForedraftError

DECAYS = ("linear", "cosine", "constant")
OPTIMIZERS = ("adamw", "muon")
BETAS = (0.9, 0.95)  # decay rates of AdamW's moments
MUON_WEIGHT_DECAY = 0.05


@dataclass(frozen=True)
class LearningRateSchedule:
    """Schedule that rises over `warmup` steps, then falls to zero at `steps` unless the decay is constant."""

    steps: int
    warmup: int
    decay: str = "cosine"

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ForedraftError(f"unknown decay {self.decay!r}; use one of {', '.join(DECAYS)}")

    def compute_scale(self, step: int) -> float:
        """Return the factor of the learning rate for a step, counted from 0."""
        rise = min(1.0, (step + 1) / max(self.warmup, 1))
        remaining = max(0.0, (self.steps - step) / max(self.steps - self.warmup, 1))
        if step < self.warmup or self.decay == "constant":
            return rise
        return min(remaining, 1.0) if self.decay == "linear" else 0.5 - 0.5 * math.cos(math.pi * min(remaining, 1.0))


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a factor of the learning rate."""

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    rate_scale: float = 1.0

    @classmethod
    def from_network(cls, network: nn.Module, rate_scale: float = 1.0) -> "ParameterGroup":
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        return cls(tuple(p for _, p in named), tuple(name for name, _ in named), rate_scale)


class GroupedOptimizer:
    """Optimizer of several parameter groups. Gradients are clipped together; each group has its own rate."""

    def __init__(
        self, kind: str, groups: Sequence[ParameterGroup], learning_rate: float, weight_decay: float = 0.0
    ) -> None:
        if kind not in OPTIMIZERS:
            raise ForedraftError(f"unknown optimizer {kind!r}; use one of {', '.join(OPTIMIZERS)}")
        self.parameters = [p for group in groups for p in group.parameters]
        if not self.parameters:
            raise ForedraftError("nothing in this drafter can be trained: no parameter takes a gradient")
        self.learning_rate = learning_rate
        self.optimizers: list[torch.optim.Optimizer] = []
        self._rate_scales: list[float] = []
        for group in groups:
            is_matrix = [
                _is_hidden_matrix(n, p) and kind == "muon" for n, p in zip(group.names, group.parameters, strict=True)
            ]
            matrices = [p for p, is_hidden in zip(group.parameters, is_matrix, strict=True) if is_hidden]
            others = [p for p, is_hidden in zip(group.parameters, is_matrix, strict=True) if not is_hidden]
            if matrices:
                self._add_optimizer(
                    torch.optim.Muon(matrices, lr=1.0, weight_decay=MUON_WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
                    group,
                )
            if others:
                fused = all(p.device.type in ("cpu", "cuda") for p in others)
                adam = torch.optim.AdamW(others, lr=1.0, betas=BETAS, weight_decay=weight_decay, fused=fused)
                self._add_optimizer(adam, group)

    def _add_optimizer(self, optimizer: torch.optim.Optimizer, group: ParameterGroup) -> None:
        self.optimizers.append(optimizer)
        self._rate_scales.append(group.rate_scale)

    def step(self, scale: float, clip: float) -> float:
        """Update the parameters and clear the gradients.

        Args:
            scale: Factor of the learning rate.
            clip: Maximum norm of the gradient.

        Returns:
            Norm of the gradient before clipping.
        """
        norm = nn.utils.clip_grad_norm_(self.parameters, clip)
        for optimizer, rate in zip(self.optimizers, self._rate_scales, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * scale * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        for optimizer, saved in zip(self.optimizers, state, strict=True):
            optimizer.load_state_dict(saved)


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Check whether a parameter is a matrix between hidden states; Muon is not meant for embeddings and heads."""
    return parameter.ndim == 2 and not any(word in name for word in ("embed", "emb.", "head"))
