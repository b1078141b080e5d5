"""Sampling parameters, and the one function that turns logits into a law.

Target and drafter alike go through `distribution`; nothing else in the project knows what a temperature is.
Greedy is the one-hot law. This file knows nothing of models, requests or speculation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
from torch import Tensor

from foredraft import filters
from foredraft.filters import NEVER
from foredraft.grammar import Grammar, Matcher

# (ids [1, L] int64, scores [1, V]) -> scores [1, V]; transformers' LogitsProcessor is one
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Sampling:
    """How one request draws its tokens, and when it ends. Raises ValueError on impossible values.

    Order of operations (as in vLLM and transformers): grammar, allowed ids, bad words, min_tokens, logit bias;
    repetition, frequency and presence penalties; logits_processors; temperature; top-k; top-p; min-p; typical-p.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # prompt and output, CTRL (1909.05858)
    presence_penalty: float = 0.0  # output only
    frequency_penalty: float = 0.0  # output only
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str | tuple[int, ...], ...] = ()  # strings, or token-id sequences
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # also report this many of the likeliest tokens
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # what the text must follow
    # Functions of (ids [1, L], scores [1, V]) that return new scores [1, V], applied in order. `ids` are the prompt,
    # the output and the drafted tokens before the position. Each must be pure: it also runs for drafts, in any order.
    logits_processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        as_tuple: dict[str, tuple[object, ...]] = {
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        }
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        as_tuple["bad_words"] = tuple(w if isinstance(w, str) else tuple(w) for w in words)
        as_tuple["stop_token_ids"] = tuple(self.stop_token_ids)
        as_tuple["logits_processors"] = tuple(self.logits_processors)
        if self.allowed_token_ids is not None:
            as_tuple["allowed_token_ids"] = tuple(self.allowed_token_ids)
        for name, value in as_tuple.items():
            object.__setattr__(self, name, value)
        self._validate()

    def _validate(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, float):
                _check(math.isfinite(value), f"{spec.name} must be a finite number, got {value}")
        for name in ("max_tokens", "min_tokens", "top_k", "n"):
            value = getattr(self, name)
            _check(_is_int(value), f"{name} must be an integer, got {value!r}")
        for name in ("seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or _is_int(value), f"{name} must be an integer or None, got {value!r}")
        _check(self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}")
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must lie in 0..max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )
        _check(self.temperature >= 0, f"temperature must be >= 0 (0 is greedy), got {self.temperature}")
        _check(self.top_k >= 0, f"top_k must be >= 0 (0 is off), got {self.top_k}")
        _check(0 < self.top_p <= 1, f"top_p must lie in (0, 1], got {self.top_p}")
        _check(0 <= self.min_p <= 1, f"min_p must lie in [0, 1], got {self.min_p}")
        _check(0 < self.typical_p <= 1, f"typical_p must lie in (0, 1], got {self.typical_p}")
        _check(self.repetition_penalty > 0, f"repetition_penalty must be > 0, got {self.repetition_penalty}")
        _check(self.n >= 1, f"n must be at least 1, got {self.n}")
        _check(all(self.stop), "stop holds an empty string; remove it")
        _check(all(self.bad_words), "bad_words holds an empty word; remove it")
        _check(self.allowed_token_ids != (), "allowed_token_ids is empty: no token could be drawn; use None for all")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _check(count is None or count >= 0, f"{name} must be >= 0 or None, got {count}")
        _check(
            self.grammar is None or isinstance(self.grammar, Grammar),
            f"grammar must be a Grammar (Grammar.json_schema(...) and so on) or None, got {self.grammar!r:.80}",
        )
        for processor in self.logits_processors:
            _check(callable(processor), f"logits_processors takes functions of (ids, scores), got {processor!r:.80}")
        self._validate_ids()

    def _validate_ids(self) -> None:
        # a negative id would count from the end of the vocabulary
        named: dict[str, Sequence[object]] = {
            "logit_bias": tuple(self.logit_bias),
            "bad_words": [token for word in self.bad_words if not isinstance(word, str) for token in word],
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in named.items():
            for token in ids:
                _check(_is_int(token) and token >= 0, f"{name} takes token ids >= 0, got {token!r}")  # type: ignore[operator]
        for bias in self.logit_bias.values():
            _check(math.isfinite(bias), f"logit_bias must be finite numbers, got {bias}; bad_words forbids a token")

    @cached_property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def shapes_logits(self) -> bool:
        """Something acts on the logits before the temperature, so the history of each row matters or may matter."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.allowed_token_ids is not None
            or self.grammar is not None
            or self.logits_processors
        )


@dataclass(frozen=True)
class History:
    """The tokens before one row of logits, and what the text must not do yet."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    drafted: Sequence[int] = ()  # the path from below the root to this row's node
    end_ids: Sequence[int] = ()  # ids min_tokens forbids: end of text and stop ids
    bad_words: Sequence[Sequence[int]] = ()  # token-id sequences
    matcher: Matcher | None = None  # of the request's grammar

    @property
    def num_output(self) -> int:
        return len(self.output) + len(self.drafted)


_NO_HISTORY = History()


def distribution(
    logits: Tensor, sampling: Sampling | Sequence[Sampling], history: Sequence[History] | None = None
) -> Tensor:
    """The law each row draws its next token from.

    logits [R, V] (not modified); one Sampling for all rows or one per row; one History per row where penalties, bad
    words or min_tokens are used. Returns [R, V]: float64 for float64 logits, else float32. A row that is not a law
    (NaN or +inf among its logits, or nothing left to draw) comes back as NaN throughout.
    """
    rows = [sampling] * len(logits) if isinstance(sampling, Sampling) else list(sampling)
    if len(rows) != len(logits):
        raise ValueError(f"{len(rows)} sets of sampling parameters for {len(logits)} rows of logits")
    x = shaped(logits, rows, history)
    if all(s.is_greedy for s in rows):
        return filters.one_hot(x)
    p = _sampled(x, rows)
    if any(s.is_greedy for s in rows):
        greedy = torch.tensor([s.is_greedy for s in rows], device=x.device)
        p = torch.where(greedy[:, None], filters.one_hot(x), p)
    return p


def shaped(logits: Tensor, rows: Sequence[Sampling], history: Sequence[History] | None = None) -> Tensor:
    """[R, V] float32, or float64 as given: the logits a temperature acts on, whose largest is the greedy choice."""
    x = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    if any(s.shapes_logits for s in rows):
        return shape_logits(x, rows, history or [_NO_HISTORY] * len(rows))
    return x


def shape_logits(logits: Tensor, rows: Sequence[Sampling], history: Sequence[History]) -> Tensor:
    """Grammar, allowed ids, bad words, min_tokens and bias, the penalties, logits processors. [R, V] -> a new [R, V].

    Where a grammar leaves nothing but the end of the text, no other parameter forbids it.
    """
    x = logits.clone()
    is_over = [False] * len(rows)
    for i, (s, h) in enumerate(zip(rows, history, strict=True)):
        if s.grammar is not None and _follow(x[i], h):
            is_over[i] = True
            continue
        if s.allowed_token_ids is not None:
            keep = torch.full_like(x[i], NEVER)
            keep[list(s.allowed_token_ids)] = 0
            x[i] += keep
        for word in h.bad_words if s.bad_words else ():
            if _ends_with(h, word[:-1]):
                x[i, word[-1]] += NEVER  # added, not assigned: a NaN stays one
        if h.num_output < s.min_tokens and h.end_ids:
            x[i, list(h.end_ids)] += NEVER
        if s.logit_bias:
            ids = torch.tensor(list(s.logit_bias), device=x.device)
            x[i, ids] += torch.tensor(list(s.logit_bias.values()), dtype=x.dtype, device=x.device)
    if any(s.has_penalties for s in rows):
        x = _penalised(x, rows, history)
    for i, (s, h) in enumerate(zip(rows, history, strict=True)):
        if s.logits_processors and not is_over[i]:
            x[i] = _process(x[i], s.logits_processors, h)
    return x


def _process(row: Tensor, processors: Sequence[LogitsProcessor], history: History) -> Tensor:
    """Apply logits processors to one row [V]. Raises ValueError if one returns another shape."""
    ids = torch.tensor([[*history.prompt, *history.output, *history.drafted]], device=row.device)  # [1, L]
    scores = row[None].clone()  # a processor may write in place
    for processor in processors:
        scores = processor(ids, scores)
        if not isinstance(scores, Tensor) or scores.shape != (1, len(row)):
            raise ValueError(f"the logits processor {type(processor).__name__} must return scores [1, {len(row)}]")
    return scores[0].to(row.dtype)


def _follow(x: Tensor, history: History) -> bool:
    """Forbid, in place, what the grammar does not allow in this row [V]; True if only an end is left."""
    if history.matcher is None:
        raise ValueError("a grammar needs History.matcher, made by Grammars.matcher")
    allowed = history.matcher.after(history.output, history.drafted)
    if allowed.mask is not None:
        x += torch.where(allowed.mask.to(x.device), 0.0, NEVER)  # added: a NaN stays one
    return allowed.is_finished


def _ends_with(history: History, prefix: Sequence[int]) -> bool:
    if not prefix:
        return True
    near = [*history.prompt[-len(prefix) :], *history.output[-len(prefix) :], *history.drafted]
    return tuple(near[-len(prefix) :]) == tuple(prefix)


def _counts(history: Sequence[History], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[R, V] occurrences in the output (drafted prefix included), and in the prompt."""
    out = torch.zeros(len(history), size, dtype=torch.int64, device=device)
    prompt = torch.zeros_like(out)
    shared: dict[tuple[int, int], int] = {}  # rows of one request hold the very same lists: count those once
    for i, h in enumerate(history):
        first = shared.setdefault((id(h.prompt), id(h.output)), i)
        if first == i:
            out[i] = torch.bincount(torch.tensor(h.output, dtype=torch.int64), minlength=size)
            prompt[i] = torch.bincount(torch.tensor(h.prompt, dtype=torch.int64), minlength=size)
        else:
            out[i], prompt[i] = out[first], prompt[first]
    # drafted tokens last: a shared row must be copied before its own path is added
    for i, h in enumerate(history):
        if h.drafted:
            ids = torch.tensor(h.drafted, device=device)
            out[i].index_add_(0, ids, torch.ones_like(ids))
    return out, prompt


def _column(rows: Sequence[Sampling], name: str, x: Tensor) -> Tensor:
    return torch.tensor([getattr(s, name) for s in rows], dtype=x.dtype, device=x.device)[:, None]


def _shared(rows: Sequence[Sampling], name: str, x: Tensor) -> filters.Column:
    """One number where all rows agree, which spares the step of a lone request some small tensors; else [R, 1]."""
    values = [getattr(s, name) for s in rows]
    return values[0] if values and values.count(values[0]) == len(values) else _column(rows, name, x)


def _penalised(x: Tensor, rows: Sequence[Sampling], history: Sequence[History]) -> Tensor:
    out, prompt = _counts(history, x.shape[-1], x.device)
    repetition = _column(rows, "repetition_penalty", x)
    seen = (out + prompt) > 0
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - _column(rows, "frequency_penalty", x) * out
    return x - _column(rows, "presence_penalty", x) * (out > 0)


def _sampled(x: Tensor, rows: Sequence[Sampling]) -> Tensor:
    temperature = _shared(rows, "temperature", x)
    if isinstance(temperature, Tensor) or temperature != 1:
        # the largest logit moves to zero first, so a small temperature cannot overflow; one below the smallest normal
        # number would round to zero (greedy rows are replaced later)
        tiny = torch.finfo(x.dtype).tiny
        x = x - x.amax(-1, keepdim=True)
        x /= temperature.clamp_min(tiny) if isinstance(temperature, Tensor) else max(temperature, tiny)
    if any(s.top_k for s in rows):
        x = filters.keep_top_k(x, [s.top_k for s in rows])
    p = x.softmax(-1)
    if any(s.top_p < 1 for s in rows):
        p = filters.keep_top_p(p, _shared(rows, "top_p", p))
    if any(s.min_p for s in rows):
        p = filters.keep_min_p(p, _shared(rows, "min_p", p))
    if any(s.typical_p < 1 for s in rows):
        p = filters.keep_typical(p, _shared(rows, "typical_p", p))
    return p
