"""Optimizers and learning-rate schedule: AdamW, or Muon for the inner matrices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.errors import ForedraftError

DECAYS = ("linear", "cosine", "constant")
OPTIMIZERS = ("adamw", "muon")
BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class LearningRateSchedule:
    """A rise over `warmup` steps, then a fall to zero at `steps`."""

    steps: int
    warmup: int
    decay: str = "cosine"

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ForedraftError(f"unknown decay {self.decay!r}; use one of {', '.join(DECAYS)}")

    def compute_scale(self, step: int) -> float:
        """Share of the learning rate that step `step`, counted from 0, uses."""
        rise = min(1.0, (step + 1) / max(self.warmup, 1))
        left = max(0.0, (self.steps - step) / max(self.steps - self.warmup, 1))
        if step < self.warmup or self.decay == "constant":
            return rise
        return min(left, 1.0) if self.decay == "linear" else 0.5 - 0.5 * math.cos(math.pi * min(left, 1.0))


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a multiple of the learning rate."""

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    rate_scale: float = 1.0

    @classmethod
    def from_network(cls, network: nn.Module, rate_scale: float = 1.0) -> "ParameterGroup":
        found = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        return cls(tuple(p for _, p in found), tuple(name for name, _ in found), rate_scale)


class GroupedOptimizer:
    """One step for all groups: gradients clipped together, each at its own rate."""

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
            inner = [
                _is_hidden_matrix(n, p) and kind == "muon" for n, p in zip(group.names, group.parameters, strict=True)
            ]
            matrices = [p for p, is_inner in zip(group.parameters, inner, strict=True) if is_inner]
            others = [p for p, is_inner in zip(group.parameters, inner, strict=True) if not is_inner]
            if matrices:
                self._add_optimizer(
                    torch.optim.Muon(matrices, lr=1.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"), group
                )
            if others:
                fused = all(p.device.type in ("cpu", "cuda") for p in others)
                adam = torch.optim.AdamW(others, lr=1.0, betas=BETAS, weight_decay=weight_decay, fused=fused)
                self._add_optimizer(adam, group)

    def _add_optimizer(self, optimizer: torch.optim.Optimizer, group: ParameterGroup) -> None:
        self.optimizers.append(optimizer)
        self._rate_scales.append(group.rate_scale)

    def step(self, scale: float, clip: float) -> float:
        """Update at `scale` times the learning rate and clear the gradients; the norm they had before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters, clip)
        for part, rate in zip(self.optimizers, self._rate_scales, strict=True):
            for group in part.param_groups:
                group["lr"] = self.learning_rate * scale * rate
            part.step()
            part.zero_grad(set_to_none=True)
        return float(norm)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.optimizers]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        for part, saved in zip(self.optimizers, state, strict=True):
            part.load_state_dict(saved)


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """A matrix between hidden states; Muon is not meant for what reads or writes a vocabulary."""
    return parameter.ndim == 2 and not any(word in name for word in ("embed", "emb.", "head"))
