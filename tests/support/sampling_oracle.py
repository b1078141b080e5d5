"""Slow references: one row at a time, plain Python numbers, nothing shared with the code under test but its types."""

import math
from collections.abc import Sequence
from itertools import pairwise

from foredraft.sampling.distribution import TokenHistory
from foredraft.sampling.params import Sampling

NEVER = -math.inf


class NoDistributionError(Exception):
    """The row has no distribution: NaN or +inf among its logits, or no token left to sample."""


def compute_distribution(logits: Sequence[float], s: Sampling, h: TokenHistory | None = None) -> list[float]:
    """Compute the next token's distribution in the order of operations of `Sampling`. Raises NoDistributionError."""
    return compute_distribution_and_margin(logits, s, h)[0]


def compute_distribution_and_margin(
    logits: Sequence[float], s: Sampling, h: TokenHistory | None = None
) -> tuple[list[float], float]:
    """Also how near the nearest cut of a filter was: below about 1e-9 two right programs may differ by rounding."""
    h = h or TokenHistory()
    x = [float(value) for value in logits]
    if any(math.isnan(value) or value == math.inf for value in x):
        raise NoDistributionError
    x = _shape_logits(x, s, h)
    best = max(x)
    if best == NEVER:
        raise NoDistributionError
    if s.temperature == 0:
        return [1.0 if i == x.index(best) else 0.0 for i in range(len(x))], math.inf
    x = [(value - best) / s.temperature for value in x]
    if 0 < s.top_k < len(x):
        floor = sorted(x, reverse=True)[s.top_k - 1]
        x = [value if value >= floor else NEVER for value in x]
    p = _normalize([math.exp(value) for value in x])
    margin = math.inf
    if s.top_p < 1:
        p, margin = _keep_mass(p, s.top_p, [-value for value in p])
    if s.min_p > 0:
        bar = s.min_p * max(p)
        gaps = [abs(value - bar) for value in p if 0 < value < max(p)]
        margin = min([margin, *gaps])
        p = _normalize([value if value >= bar else 0.0 for value in p])
    if s.typical_p < 1:
        entropy = -sum(value * math.log(value) for value in p if value > 0)
        gap = [abs(-math.log(value) - entropy) if value > 0 else math.inf for value in p]
        ordered = sorted(g for g in gap if g < math.inf)
        near = [b - a for a, b in pairwise(ordered) if b != a]
        p, other = _keep_mass(p, s.typical_p, gap)
        margin = min([margin, other, *near])
    return p, margin


def _shape_logits(x: list[float], s: Sampling, h: TokenHistory) -> list[float]:
    text = [*h.prompt, *h.output, *h.draft_path]
    output = [*h.output, *h.draft_path]
    for token in range(len(x)):
        if s.allowed_token_ids is not None and token not in s.allowed_token_ids:
            x[token] = NEVER
        for word in h.bad_words if s.bad_words else ():
            *start, last = word
            if last == token and (not start or text[-len(start) :] == start):
                x[token] = NEVER
        if token in h.end_ids and len(output) < s.min_tokens:
            x[token] = NEVER
        x[token] += s.logit_bias.get(token, 0.0)
        if token in text:
            x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
        x[token] -= s.frequency_penalty * output.count(token)
        x[token] -= s.presence_penalty * (token in output)
    return x


def _normalize(p: list[float]) -> list[float]:
    total = sum(p)
    return [value / total for value in p]


def _keep_mass(p: list[float], mass: float, rank: list[float]) -> tuple[list[float], float]:
    """Keep the tokens with a mass below `mass` before them, by rising rank, lower ids first; also the nearest cut."""
    kept, total, margin = [0.0] * len(p), 0.0, math.inf
    for token in sorted(range(len(p)), key=lambda token: rank[token]):
        before = total
        total += p[token]
        if before > 0 and p[token] > 0:
            margin = min(margin, abs(before - mass))
        if before < mass:
            kept[token] = p[token]
    return _normalize(kept), margin
