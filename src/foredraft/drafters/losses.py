"""Traces of the target, and losses of trainable drafters against its distribution."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.drafters.fused_kl import MIN_LOG_PROB, FusedKL
from foredraft.errors import ForedraftError
from foredraft.source import EncoderSource

LK_SHARPNESS = 3.0  # eta of 2602.23881
MIN_REST = 1e-6  # floor of the probability of all tokens that are not listed
MIN_WEIGHT = 1e-9  # floor of the sum of weights, before a division


@dataclass(frozen=True)
class TargetLogProbs:
    """Target distribution p at some positions: log-probabilities of the k likeliest tokens, or of all.

    The other tokens share the remaining probability as one outcome.
    """

    logprobs: Tensor  # [.., k] float32, natural logarithm
    token_ids: Tensor | None = None  # [.., k] int64; in any order; None = the whole vocabulary

    @classmethod
    def from_logits(cls, logits: Tensor, top: int | None = None) -> "TargetLogProbs":
        """Make it from logits [.., V]; keep the `top` likeliest tokens of each row, None = all."""
        logprobs = logits.float().log_softmax(-1)
        if top is None or top >= logits.shape[-1]:
            return cls(logprobs)
        best = logprobs.topk(top, -1)
        return cls(best.values, best.indices)

    def find_argmax(self) -> Tensor:
        """Return the likeliest token [..] of every position."""
        best = self.logprobs.argmax(-1, keepdim=True)
        return (best if self.token_ids is None else self.token_ids.gather(-1, best)).squeeze(-1)

    def select(self, index: Any) -> "TargetLogProbs":
        """Select positions by any index of the leading dimensions."""
        return TargetLogProbs(self.logprobs[index], None if self.token_ids is None else self.token_ids[index])

    def align_outcomes(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p and log q over the same outcomes.

        Args:
            logits: draft logits [.., V], which define q.

        Returns:
            Two tensors [.., V], or [.., k + 1] with the other tokens as the last outcome.
        """
        log_q = logits.float().log_softmax(-1)
        if self.token_ids is None:
            return self.logprobs, log_q
        q_top = log_q.gather(-1, self.token_ids)
        return _append_rest(self.logprobs), _append_rest(q_top)


def _append_rest(logprobs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens together."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(MIN_REST).log()
    return torch.cat([logprobs, rest], -1)


Divergence = Callable[[Tensor, Tensor], Tensor]  # (log p, log q [.., k]) -> [..]


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(p || q), which makes the draft cover all likely tokens of the target."""
    return (log_p.exp() * (log_p.clamp_min(MIN_LOG_PROB) - log_q)).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute KL(q || p), which concentrates the draft on the target's likeliest tokens."""
    return (log_q.exp() * (log_q - log_p.clamp_min(MIN_LOG_PROB))).sum(-1)


def tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute the total variation distance: one minus the acceptance probability of the rule `reject`."""
    return 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def lk(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute a mix of KL and total variation; the weight of KL falls as acceptance rises.

    Reference: 2602.23881, hybrid loss.
    """
    distance = tv(log_p, log_q)
    weight = torch.exp(-LK_SHARPNESS * (1 - distance.detach()))
    return weight * kl(log_p, log_q) + (1 - weight) * distance


DIVERGENCES: dict[str, Divergence] = {"kl": kl, "reverse_kl": reverse_kl, "tv": tv, "lk": lk}
LOSS_NAMES = ("ce", *DIVERGENCES)


def check_loss(name: str) -> None:
    """Raise ForedraftError for a name that is not in LOSS_NAMES."""
    if name not in LOSS_NAMES:
        raise ForedraftError(f"unknown loss {name!r}; use one of {', '.join(LOSS_NAMES)}")


def check_decay(decay: float) -> None:
    """Raise ForedraftError for a factor of weights decay^k that is not in (0, 1]."""
    if not 0 < decay <= 1:
        raise ForedraftError(f"decay must be above 0 and at most 1, got {decay}")


def compute_draft_loss(name: str, logits: Tensor, target_log_probs: TargetLogProbs, tokens: Tensor) -> Tensor:
    """Compute the loss per position.

    Args:
        name: loss, one of LOSS_NAMES.
        logits: draft logits [.., V].
        target_log_probs: target distribution [.., k]; not used by "ce".
        tokens: next tokens of the sequence [..]; used by "ce" alone.

    Returns:
        Losses [..].
    """
    if name == "ce":
        return F.cross_entropy(logits.float().flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)
    if name == "kl" and target_log_probs.token_ids is None and not target_log_probs.logprobs.requires_grad:
        return FusedKL.apply(logits, target_log_probs.logprobs)  # type: ignore[no-any-return,no-untyped-call]
    return DIVERGENCES[name](*target_log_probs.align_outcomes(logits))


def average_over_mask(loss: Tensor, mask: Tensor) -> Tensor:
    """Average the loss over the positions where the mask, of the same shape, is True."""
    return (loss * mask).sum() / mask.sum().clamp_min(1)


@dataclass(frozen=True)
class Trace:
    """Target outputs over B sequences of L + 1 tokens. Index i of the outputs is after tokens[:, : i + 1]."""

    tokens: Tensor  # [B, L + 1] int64
    features: Tensor  # [B, L, F] target states of the hidden layers, concatenated
    target_log_probs: TargetLogProbs  # [B, L, ..] distribution of tokens[:, i + 1]
    mask: Tensor  # [B, L + 1] bool: tokens to train on; False for prompts and padding
    sources: tuple[EncoderSource, ...] = ()  # B sources of an encoder-decoder model; () for a decoder alone


@dataclass(frozen=True)
class Losses:
    """Loss of one batch, and its components."""

    total: Tensor  # scalar, with a gradient
    components: Mapping[str, float]  # by name, for the log


def average_losses(losses: Iterable[Tensor], decay: float) -> Losses:
    """Average the losses of heads or steps; loss k, from 0, has the weight decay^k and the name `loss_{k + 1}`."""
    total, total_weight, components = torch.zeros(()), 0.0, {}
    for k, loss in enumerate(losses):
        weight = decay**k
        total, total_weight = total.to(loss.device) + weight * loss, total_weight + weight
        components[f"loss_{k + 1}"] = float(loss.detach())
    return Losses(total / max(total_weight, MIN_WEIGHT), components)
