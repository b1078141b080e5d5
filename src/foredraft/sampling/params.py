"""Sampling parameters of one request, and their validation. No tensors are computed here."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from torch import Tensor

from foredraft.sampling.grammar import Grammar

# (ids [1, L] int64, scores [1, V]) -> scores [1, V]; transformers' LogitsProcessor is one
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request, and the conditions that end it.

    The order of operations is that of vLLM and transformers: grammar, allowed ids, bad words, min_tokens, logit bias;
    repetition, frequency and presence penalties; logits_processors; temperature; top-k; top-p; min-p; typical-p.
    The default temperature is 1.0 in the library and 0.0 (greedy) on the command line.

    Raises:
        ValueError: if a value has the wrong type or is out of range.
    """

    max_tokens: int = 128  # upper limit on output tokens
    min_tokens: int = 0  # end ids are forbidden before this many output tokens
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # sample from this many of the likeliest tokens; 0 = off
    top_p: float = 1.0  # sample from the likeliest tokens that reach this mass, in (0, 1]; 1 = off
    min_p: float = 0.0  # minimum probability relative to that of the likeliest token, in [0, 1]; 0 = off
    typical_p: float = 1.0  # mass of locally typical sampling (2202.00666), in (0, 1]; 1 = off
    repetition_penalty: float = 1.0  # on tokens of prompt and output, CTRL (1909.05858); 1 = off
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # the same, times the number of occurrences
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> number added to its logit
    bad_words: tuple[str | tuple[int, ...], ...] = ()  # forbidden strings, or token-id sequences
    allowed_token_ids: tuple[int, ...] | None = None  # None = all
    seed: int | None = None  # equal seeds give equal outputs; None = a random seed
    n: int = 1  # outputs per prompt
    stop: tuple[str, ...] = ()  # strings that end the output; they are not part of it
    stop_token_ids: tuple[int, ...] = ()  # token ids that end the output, besides the end ids of the model
    ignore_eos: bool = False  # do not end at the end ids of the model
    logprobs: int | None = None  # report log-probabilities of output tokens and of this many likeliest; None = off
    prompt_logprobs: int | None = None  # the same for prompt tokens
    grammar: Grammar | None = None  # grammar that the output must follow
    # Functions of (ids [1, L], scores [1, V]) that return new scores [1, V], applied in order. `ids` are the prompt,
    # the output and the draft tokens before the position. Each must be pure: it also runs for drafts, in any order.
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
                _require(math.isfinite(value), f"{spec.name} must be a finite number, got {value}")
        for name in ("max_tokens", "min_tokens", "top_k", "n"):
            value = getattr(self, name)
            _require(_is_int(value), f"{name} must be an integer, got {value!r}")
        for name in ("seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _is_int(value), f"{name} must be an integer or None, got {value!r}")
        _require(self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            f"min_tokens must lie in 0..max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )
        _require(self.temperature >= 0, f"temperature must be >= 0 (0 is greedy), got {self.temperature}")
        _require(self.top_k >= 0, f"top_k must be >= 0 (0 is off), got {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must lie in (0, 1], got {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must lie in [0, 1], got {self.min_p}")
        _require(0 < self.typical_p <= 1, f"typical_p must lie in (0, 1], got {self.typical_p}")
        _require(self.repetition_penalty > 0, f"repetition_penalty must be > 0, got {self.repetition_penalty}")
        _require(self.n >= 1, f"n must be at least 1, got {self.n}")
        _require(all(self.stop), "stop holds an empty string; remove it")
        _require(all(self.bad_words), "bad_words holds an empty word; remove it")
        _require(
            self.allowed_token_ids != (), "allowed_token_ids is empty: no token could be sampled; use None for all"
        )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            _require(count is None or count >= 0, f"{name} must be >= 0 or None, got {count}")
        _require(
            self.grammar is None or isinstance(self.grammar, Grammar),
            f"grammar must be a Grammar (Grammar.json_schema(...) and so on) or None, got {self.grammar!r:.80}",
        )
        for processor in self.logits_processors:
            _require(callable(processor), f"logits_processors takes functions of (ids, scores), got {processor!r:.80}")
        self._validate_ids()

    def _validate_ids(self) -> None:
        """Require token ids >= 0: a negative id would count from the end of the vocabulary."""
        ids_by_name: dict[str, Sequence[object]] = {
            "logit_bias": tuple(self.logit_bias),
            "bad_words": [token for word in self.bad_words if not isinstance(word, str) for token in word],
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in ids_by_name.items():
            for token in ids:
                _require(_is_int(token) and token >= 0, f"{name} takes token ids >= 0, got {token!r}")  # type: ignore[operator]
        for bias in self.logit_bias.values():
            _require(math.isfinite(bias), f"logit_bias must be finite numbers, got {bias}; bad_words forbids a token")

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the temperature is 0."""
        return self.temperature == 0

    @cached_property
    def filter_settings(self) -> tuple[float, float, float, float, float]:
        """Temperature, top-k, top-p, min-p and typical-p, as the native sampler takes them."""
        return self.temperature, float(self.top_k), self.top_p, self.min_p, self.typical_p

    @cached_property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties is on."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def shapes_logits(self) -> bool:
        """Whether a parameter changes logits before the temperature. Such rows need a token history."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.allowed_token_ids is not None
            or self.grammar is not None
            or self.logits_processors
        )
