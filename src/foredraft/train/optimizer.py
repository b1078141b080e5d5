"""Optimizers and learning-rate schedule: AdamW, or Muon for the matrices between hidden states."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foredraft.errors import ForedraftError

DECAYS = ("linear", "cosine", "constant")
OPTIMIZERS = ("adamw", "muon")
BETAS = (0.9, 0.95)  # decay rates of AdamW's moments
MUON_WEIGHT_DECAY = 0.05
# Parts of the names of lookup tables and heads. T5 calls its embeddings "shared".
TABLE_WORDS = ("embed", "emb.", "head", "shared", "relative_attention_bias")


@dataclass(frozen=True)
class LearningRateSchedule:
    """Schedule that rises over `warmup` steps, may stay constant, and falls to zero at `steps`."""

    steps: int
    warmup: int
    decay: str = "cosine"  # "constant" = it does not fall
    first_step: int = 0  # step at which the warm-up begins
    decay_start: int | None = None  # step at which it begins to fall; None = at the end of the warm-up

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise ForedraftError(f"unknown decay {self.decay!r}; use one of {', '.join(DECAYS)}")

    def compute_scale(self, step: int) -> float:
        """Return the factor of the learning rate for a step, counted from 0."""
        rise = min(1.0, (step - self.first_step + 1) / max(self.warmup, 1))
        if self.decay == "constant":
            return rise
        start = self.first_step + self.warmup if self.decay_start is None else self.decay_start
        remaining = min(1.0, max(0.0, (self.steps - step) / max(self.steps - start, 1)))
        return min(rise, remaining if self.decay == "linear" else 0.5 - 0.5 * math.cos(math.pi * remaining))


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that share a factor of the learning rate."""

    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    rate_scale: float = 1.0
    start: float = 0.0  # share of the run in which they stay as they are

    @classmethod
    def from_network(cls, network: nn.Module, rate_scale: float = 1.0, start: float = 0.0) -> "ParameterGroup":
        named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        return cls(tuple(p for _, p in named), tuple(name for name, _ in named), rate_scale, start)


class SavedOptimizer(Protocol):
    """Optimizer as a checkpoint sees it."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


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
        self._groups: list[ParameterGroup] = []  # of each optimizer
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
        self._groups.append(group)

    def step(self, scale: float, clip: float, progress: float = 1.0) -> float:
        """Update the parameters and clear the gradients.

        Args:
            scale: Factor of the learning rate.
            clip: Maximum norm of the gradient.
            progress: Share of the run that is done. Groups that start later get the rate 0, which stops weight decay
                too. Default 1 = all groups learn.

        Returns:
            Norm of the gradient before clipping.
        """
        norm = self.clip_gradients(clip)
        for optimizer, group in zip(self.optimizers, self._groups, strict=True):
            rate = group.rate_scale if progress >= group.start else 0.0
            for entry in optimizer.param_groups:
                entry["lr"] = self.learning_rate * scale * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def clip_gradients(self, max_norm: float) -> float:
        """Clip all gradients together. Returns their norm before."""
        return float(nn.utils.clip_grad_norm_(self.parameters, max_norm))

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        for optimizer, saved in zip(self.optimizers, state, strict=True):
            optimizer.load_state_dict(saved)


class MasterWeightOptimizer:
    """Optimizer of a network in low precision: it updates float32 copies of the parameters and rounds them.

    Args:
        kind: one of OPTIMIZERS.
        network: network whose parameters and gradients are in low precision.
        learning_rate: learning rate at scale 1.
    """

    def __init__(self, kind: str, network: nn.Module, learning_rate: float) -> None:
        group = ParameterGroup.from_network(network)
        masters = tuple(nn.Parameter(parameter.detach().float()) for parameter in group.parameters)
        self._pairs = tuple(zip(group.parameters, masters, strict=True))  # (parameter, float32 copy)
        self._optimizer = GroupedOptimizer(kind, [replace(group, parameters=masters)], learning_rate)

    def step(self, scale: float, clip: float) -> float:
        """Update the parameters and clear the gradients; arguments and result as in `GroupedOptimizer.step`."""
        for parameter, master in self._pairs:
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        norm = self._optimizer.step(scale, clip)
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self._optimizer.state_dict(), "masters": [master.detach() for _, master in self._pairs]}

    def load_state_dict(self, state: Any) -> None:
        self._optimizer.load_state_dict(state["parts"])
        with torch.no_grad():
            for (_, master), saved in zip(self._pairs, state["masters"], strict=True):
                master.copy_(saved)


def _is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Check whether a parameter is a matrix between hidden states; Muon is not meant for lookup tables and heads."""
    return parameter.ndim == 2 and not any(word in name for word in TABLE_WORDS)
