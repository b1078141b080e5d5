"""The one function that turns logits into probabilities: `distribution`.

Target and drafters both use it; no other file applies a temperature. Greedy decoding is the one-hot distribution. This
file does not depend on models, requests or speculation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.kernels.sampler import find_sampler
from foredraft.sampling import filters, weights
from foredraft.sampling.filters import NEG_INF
from foredraft.sampling.grammar_matcher import GrammarMatcher
from foredraft.sampling.params import LogitsProcessor, Sampling


@dataclass(frozen=True)
class TokenHistory:
    """Tokens before one row of logits, and the constraints of its request."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    draft_path: Sequence[int] = ()  # draft tokens from the root (excluded) to the node of this row (included)
    end_ids: Sequence[int] = ()  # end ids of the model and stop ids of the request, which min_tokens forbids
    bad_words: Sequence[Sequence[int]] = ()  # forbidden token-id sequences
    matcher: GrammarMatcher | None = None  # grammar matcher of the request

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before the row, draft tokens included."""
        return len(self.output) + len(self.draft_path)


_NO_HISTORY = TokenHistory()


def distribution(
    logits: Tensor, sampling: Sampling | Sequence[Sampling], history: Sequence[TokenHistory] | None = None
) -> Tensor:
    """Compute the distribution of the next token of each row.

    Args:
        logits: [R, V], not modified.
        sampling: one for all rows, or one per row.
        history: one per row; needed if a sampling parameter shapes logits (`Sampling.shapes_logits`).

    Returns:
        Probabilities [R, V]: float64 for float64 logits, else float32. A row with invalid logits (NaN, +inf, or no
        token left) is NaN throughout.
    """
    rows = [sampling] * len(logits) if isinstance(sampling, Sampling) else list(sampling)
    if len(rows) != len(logits):
        raise ValueError(f"{len(rows)} sets of sampling parameters for {len(logits)} rows of logits")
    is_shaped = any(s.shapes_logits for s in rows)
    x = process_logits(logits, rows, history) if is_shaped else logits
    sampler = find_sampler(x)
    if sampler is not None:
        return sampler.compute_probs(x, [s.filter_settings for s in rows])
    return compute_reference_probs(process_logits(x, ()), rows)


def compute_reference_probs(x: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Compute `distribution` by torch's operators, from processed logits. The native sampler has the same bits."""
    if all(s.is_greedy for s in rows):
        return filters.compute_greedy_probs(x)
    p = _compute_sampled_probs(x, rows)
    if any(s.is_greedy for s in rows):
        greedy = torch.tensor([s.is_greedy for s in rows], device=x.device)
        p = torch.where(greedy[:, None], filters.compute_greedy_probs(x), p)
    return p


def process_logits(
    logits: Tensor, samplings: Sequence[Sampling], history: Sequence[TokenHistory] | None = None
) -> Tensor:
    """Return the logits before the temperature, [R, V] float32 or float64. Their argmax is the greedy token."""
    x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    if any(s.shapes_logits for s in samplings):
        return apply_constraints_and_penalties(x, samplings, history or [_NO_HISTORY] * len(samplings))
    return x


def apply_constraints_and_penalties(
    logits: Tensor, samplings: Sequence[Sampling], history: Sequence[TokenHistory]
) -> Tensor:
    """Apply grammar, allowed ids, bad words, min_tokens, bias, penalties and logits processors: [R, V] -> new [R, V].

    If a grammar allows only the end ids, no other parameter forbids them.
    """
    x = logits.clone()
    is_finished = [False] * len(samplings)  # the grammar allows only end ids
    for i, (s, h) in enumerate(zip(samplings, history, strict=True)):
        if s.grammar is not None and _apply_grammar(x[i], h):
            is_finished[i] = True
            continue
        if s.allowed_token_ids is not None:
            bias = torch.full_like(x[i], NEG_INF)
            bias[list(s.allowed_token_ids)] = 0
            x[i] += bias
        for word in h.bad_words if s.bad_words else ():
            if _ends_with(h, word[:-1]):
                x[i, word[-1]] += NEG_INF  # added, not assigned, so that NaN stays NaN
        if h.num_output_tokens < s.min_tokens and h.end_ids:
            x[i, list(h.end_ids)] += NEG_INF
        if s.logit_bias:
            ids = torch.tensor(list(s.logit_bias), device=x.device)
            x[i, ids] += torch.tensor(list(s.logit_bias.values()), dtype=x.dtype, device=x.device)
    if any(s.has_penalties for s in samplings):
        _apply_penalties(x, samplings, history)
    for i, (s, h) in enumerate(zip(samplings, history, strict=True)):
        if s.logits_processors and not is_finished[i]:
            x[i] = _apply_processors(x[i], s.logits_processors, h)
    return x


def _apply_processors(row: Tensor, processors: Sequence[LogitsProcessor], history: TokenHistory) -> Tensor:
    """Apply logits processors to one row [V]. Raises ValueError if one returns a wrong shape."""
    ids = torch.tensor([[*history.prompt, *history.output, *history.draft_path]], device=row.device)  # [1, L]
    scores = row[None].clone()  # a processor may write in place
    for processor in processors:
        scores = processor(ids, scores)
        if not isinstance(scores, Tensor) or scores.shape != (1, len(row)):
            raise ValueError(f"the logits processor {type(processor).__name__} must return scores [1, {len(row)}]")
    return scores[0].to(row.dtype)


def _apply_grammar(x: Tensor, history: TokenHistory) -> bool:
    """Forbid tokens of a row [V] in place, as the grammar says; return true if only end ids are left."""
    if history.matcher is None:
        raise ValueError("a grammar needs TokenHistory.matcher, from GrammarCompiler.create_matcher")
    allowed = history.matcher.find_allowed(history.output, history.draft_path)
    if allowed.mask is not None:
        x += torch.where(allowed.mask.to(x.device), 0.0, NEG_INF)  # added, so that NaN stays NaN
    return allowed.is_finished


def _ends_with(history: TokenHistory, suffix: Sequence[int]) -> bool:
    if not suffix:
        return True
    recent = [*history.prompt[-len(suffix) :], *history.output[-len(suffix) :], *history.draft_path]
    return tuple(recent[-len(suffix) :]) == tuple(suffix)


def _apply_penalties(x: Tensor, samplings: Sequence[Sampling], history: Sequence[TokenHistory]) -> None:
    """Apply the penalties of every row to its tokens that occurred, in place."""
    # ids of the lists -> counts: rows of one request share their lists
    shared: dict[tuple[int, int], _TokenCounts] = {}
    for i, (s, h) in enumerate(zip(samplings, history, strict=True)):
        if not s.has_penalties:
            continue
        lists = (id(h.prompt), id(h.output))
        if lists not in shared:
            shared[lists] = _TokenCounts(h.prompt, h.output)
        counts = shared[lists]
        occurring, output, numbers = counts.add_path(h.draft_path)
        repetition, frequency, presence = x.new_tensor(
            [s.repetition_penalty, s.frequency_penalty, s.presence_penalty]
        ).unbind()
        ids = torch.from_numpy(occurring).to(x.device)
        logits = x[i, ids]
        x[i, ids] = torch.where(logits > 0, logits / repetition, logits * repetition)
        ids, number = torch.from_numpy(output).to(x.device), torch.from_numpy(numbers).to(x.device)
        x[i, ids] = x[i, ids] - frequency * number - presence


class _TokenCounts:
    """Occurrences of tokens in a prompt and an output."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._tokens = np.unique(np.array([*prompt, *output], dtype=np.int64))
        self._output = np.array(output, dtype=np.int64)

    def add_path(self, path: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens that occur anywhere, and those of the output and the path with their numbers."""
        drafted = np.array(path, dtype=np.int64)
        output, numbers = np.unique(np.concatenate((self._output, drafted)), return_counts=True)
        return np.union1d(self._tokens, drafted) if len(path) else self._tokens, output, numbers


def _compute_sampled_probs(x: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Compute the probabilities of rows that are not greedy, by torch's operators; the others are not used."""
    is_valid = x.amax(-1, keepdim=True).isfinite()
    x = torch.where(is_valid, x, 0)
    if any(s.top_k for s in samplings):
        x = filters.keep_top_k(x, [s.top_k for s in samplings])
    scales = [1.0 if s.is_greedy else weights.compute_scale(s.temperature, x.dtype) for s in samplings]
    exponents = weights.compute_exponents(x, torch.tensor(scales, dtype=x.dtype, device=x.device)[:, None])
    w = weights.compute_weights(exponents)
    if any(s.top_p < 1 for s in samplings):
        w = filters.keep_top_p(w, [s.top_p for s in samplings])
    if any(s.min_p for s in samplings):
        w = filters.keep_min_p(w, [s.min_p for s in samplings])
    if any(s.typical_p < 1 for s in samplings):
        w = filters.keep_typical(w, exponents, [s.typical_p for s in samplings])
    return torch.where(is_valid, weights.normalise(w), math.nan)
