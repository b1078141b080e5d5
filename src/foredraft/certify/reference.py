"""Slow reference of the distribution after all sampling settings: one row at a time, in float64.

It shares no code with `sampling/distribution.py`, which it checks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foredraft.sampling.params import Sampling

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceRow:
    """Distribution of one row.

    Attributes:
        p: [V] probabilities.
        margin: distance of the nearest cut of a filter from the next token: below about 1e-5 two correct programs may
            differ by rounding.
    """

    p: Floats
    margin: float


@dataclass(frozen=True)
class ReferenceHistory:
    """Tokens before a row, and the constraints of its request."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]  # output tokens, those of the draft path included
    end_ids: frozenset[int]  # ids that min_tokens forbids


def compute_reference(logits: Floats, sampling: Sampling, history: ReferenceHistory) -> ReferenceRow:
    """Compute the distribution of the next token in the order of operations of `Sampling`.

    Args:
        logits: [V].
        sampling: parameters; grammars, logits processors and bad words given as text are left out.
        history: tokens before the row.
    """
    x = _shape_logits(logits.astype(np.float64), sampling, history)
    if sampling.temperature == 0:
        p = np.zeros(len(x))
        p[int(x.argmax())] = 1
        first, second = np.sort(x)[:-3:-1]
        return ReferenceRow(p, float(first - second))
    x = (x - x.max()) / sampling.temperature
    margin = np.inf
    if 0 < sampling.top_k < len(x):
        ordered = np.sort(x)[::-1]
        margin = float(ordered[sampling.top_k - 1] - ordered[sampling.top_k])
        x = np.where(x >= ordered[sampling.top_k - 1], x, -np.inf)
    p = _normalise(np.exp(x))
    margins = [margin]
    if sampling.top_p < 1:
        p, margin = _keep_mass(p, sampling.top_p, -p)
        margins.append(margin)
    if sampling.min_p > 0:
        p, margin = _keep_above(p, sampling.min_p * p.max())
        margins.append(margin)
    if sampling.typical_p < 1:
        p, margin = _keep_mass(p, sampling.typical_p, _measure_surprise(p))
        margins.append(margin)
    return ReferenceRow(p, min(margins))


def _shape_logits(x: Floats, s: Sampling, h: ReferenceHistory) -> Floats:
    sequence = (*h.prompt, *h.output)
    if s.allowed_token_ids is not None:
        allowed = np.zeros(len(x), dtype=bool)
        allowed[list(s.allowed_token_ids)] = True
        x = np.where(allowed, x, -np.inf)
    for word in (word for word in s.bad_words if isinstance(word, tuple)):
        start = word[:-1]
        if not start or sequence[-len(start) :] == start:
            x[word[-1]] = -np.inf
    if len(h.output) < s.min_tokens:
        x[list(h.end_ids)] = -np.inf
    for token, bias in s.logit_bias.items():
        x[token] += bias
    for token in set(sequence):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(h.output):
        x[token] -= s.frequency_penalty * h.output.count(token) + s.presence_penalty
    return x


def _normalise(p: Floats) -> Floats:
    result: Floats = p / p.sum()
    return result


def _keep_mass(p: Floats, mass: float, rank: Floats) -> tuple[Floats, float]:
    """Keep the tokens with a mass below `mass` before them, by rising rank; return also the nearest cut."""
    order = np.argsort(rank, kind="stable")
    order = order[p[order] > 0]
    before = np.concatenate([[0.0], p[order].cumsum()[:-1]])
    kept = np.zeros(len(p))
    chosen = order[before < mass]
    kept[chosen] = p[chosen]
    margin = float(np.abs(before[1:] - mass).min(initial=np.inf))
    if len(chosen) < len(order):  # tokens of nearly equal rank at the cut may change places
        margin = min(margin, float(rank[order[len(chosen)]] - rank[chosen[-1]]))
    return _normalise(kept), margin


def _keep_above(p: Floats, bar: float) -> tuple[Floats, float]:
    margin = float(np.abs(p[p < p.max()] - bar).min(initial=np.inf))
    return _normalise(np.where(p >= bar, p, 0.0)), margin


def _measure_surprise(p: Floats) -> Floats:
    """Distance of the surprisal of each token from the entropy; infinite for tokens without mass."""
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(p)
        entropy = float(np.where(p > 0, p * surprise, 0.0).sum())
        distance: Floats = np.abs(surprise - entropy)
        return distance
