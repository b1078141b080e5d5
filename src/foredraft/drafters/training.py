"""What every trainable drafter shares: a trace of the target's passes, losses against the target's law, a protocol."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.errors import ForedraftError

LK_SHARPNESS = 3.0  # eta of 2602.23881


@dataclass(frozen=True)
class TargetLaw:
    """The target's law p at some positions: the likeliest ids, rising or not, and what is left over for all others."""

    logprobs: Tensor  # [.., k] float32, natural
    ids: Tensor | None = None  # [.., k] int64; None = the whole vocabulary in order

    @classmethod
    def of(cls, logits: Tensor, top: int | None = None) -> "TargetLaw":
        """From [.., V]; `top` keeps that many tokens of each row."""
        logprobs = logits.float().log_softmax(-1)
        if top is None or top >= logits.shape[-1]:
            return cls(logprobs)
        found = logprobs.topk(top, -1)
        return cls(found.values, found.indices)

    def at(self, index: Any) -> "TargetLaw":
        """The law at some of the leading positions, by any index of a tensor."""
        return TargetLaw(self.logprobs[index], None if self.ids is None else self.ids[index])

    def outcomes(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """log p and log q over the same outcomes, [.., k] or with the rest as one more [.., k + 1]; logits [.., V]."""
        log_q = logits.float().log_softmax(-1)
        if self.ids is None:
            return self.logprobs, log_q
        q_top = log_q.gather(-1, self.ids)
        return _with_rest(self.logprobs), _with_rest(q_top)


def _with_rest(logprobs: Tensor) -> Tensor:
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(1e-6).log()
    return torch.cat([logprobs, rest], -1)


Divergence = Callable[[Tensor, Tensor], Tensor]  # (log p, log q [.., k]) -> [..]


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q): the draft covers what the target may say."""
    return (log_p.exp() * (log_p.clamp_min(-1e4) - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(q || p): the draft says what the target is sure of."""
    return (log_q.exp() * (log_q - log_p.clamp_min(-1e4))).sum(-1)


def tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation, one minus the chance that `reject` accepts."""
    return 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def lk(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL while acceptance is low, total variation once it is high (2602.23881, hybrid)."""
    distance = tv(log_p, log_q)
    weight = torch.exp(-LK_SHARPNESS * (1 - distance.detach()))
    return weight * kl(log_p, log_q) + (1 - weight) * distance


DIVERGENCES: dict[str, Divergence] = {"kl": kl, "reverse_kl": reverse_kl, "tv": tv, "lk": lk}
LOSSES = ("ce", *DIVERGENCES)


def check_loss(name: str) -> None:
    if name not in LOSSES:
        raise ForedraftError(f"unknown loss {name!r}; use one of {', '.join(LOSSES)}")


def draft_loss(name: str, logits: Tensor, law: TargetLaw, tokens: Tensor) -> Tensor:
    """[..] the loss of logits [.., V] against the target's law, or against the text's own next tokens [..] for "ce"."""
    if name == "ce":
        return F.cross_entropy(logits.float().flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)
    return DIVERGENCES[name](*law.outcomes(logits))


def mean(loss: Tensor, mask: Tensor) -> Tensor:
    """Over the positions of a mask of the same shape."""
    return (loss * mask).sum() / mask.sum().clamp_min(1)


@dataclass(frozen=True)
class Trace:
    """Passes of the target over B texts of L + 1 tokens. Position i of features and law follows tokens[:, i]."""

    tokens: Tensor  # [B, L + 1] int64
    features: Tensor  # [B, L, F] the target's states at the taps, side by side
    law: TargetLaw  # [B, L, ..] of tokens[:, i + 1]
    mask: Tensor  # [B, L + 1] bool: tokens to learn to draft; False for prompts and padding


@dataclass(frozen=True)
class Losses:
    total: Tensor  # scalar, with a gradient
    parts: Mapping[str, float]  # for people


class Trainee(Protocol):
    """A drafter while it learns."""

    @property
    def taps(self) -> tuple[int, ...]:
        """What of the target it learns from, as in Drafter.taps."""

    @property
    def network(self) -> nn.Module:
        """Whose parameters that require a gradient are trained."""

    def loss(self, trace: Trace) -> Losses: ...

    def published(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and config.json in the layout its checkpoints have on the hub."""
