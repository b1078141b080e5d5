"""Structured output: texts that follow a JSON schema, a regular expression, a list of choices or a Lark grammar.

A `Grammar` says what is wanted, `Grammars` compiles it for one vocabulary (with llguidance), and a `Matcher` follows
one text and says, after any drafted path, which tokens may come next.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import ForedraftError, how_to_install

KINDS = ("json_object", "json_schema", "regex", "choice", "lark")
MAX_BYTES = 1 << 17  # of a grammar's source
MAX_DEPTH = 64  # nested values of a schema
MAX_CHOICES = 4096
MAX_VALUES = 1 << 16  # values in a schema given as a dict, which may repeat one object without end
KEPT = 32  # compiled grammars of one model
INSTALL = f"structured output needs llguidance: {how_to_install('grammar')}"
END = "<|end of grammar|>"  # a token of its own, so that the ids that end a text are ours to say


@dataclass(frozen=True)
class Grammar:
    """What a text must follow, from its first token to its end.

    A text may end (EOS, or one of stop_token_ids) only where the grammar is satisfied. Once nothing can follow, the end
    ids are all that is left, whatever min_tokens or bad_words say; a request without end ids (ignore_eos, or a model
    that has none) ends there by itself, with finish_reason "stop". max_tokens and stop strings still cut a text short,
    and the token ids in stop_token_ids may be tokens of the grammar. Raises ValueError for a source that is too large,
    too deeply nested or malformed; what only the compiler can see is refused by LLM.
    """

    kind: str
    source: str = ""  # json_schema, choice: JSON; regex: the Rust crate's syntax, of the whole text; lark: llguidance's

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ForedraftError(f"unknown kind of grammar {self.kind!r}; use one of {', '.join(KINDS)}")
        if not isinstance(self.source, str):
            raise ForedraftError(f"the source of a {self.kind} grammar is a string, got {type(self.source).__name__}")
        size = len(self.source.encode("utf-8", "surrogatepass"))
        if size > MAX_BYTES:
            raise ForedraftError(f"the {self.kind} grammar has {size:,} bytes; at most {MAX_BYTES:,} are taken")
        if self.kind == "json_schema":
            value = _parsed(self.source, self.kind)
            _check_schema(value)
        elif self.kind == "choice":
            _check_choices(_parsed(self.source, self.kind))
        elif (self.kind == "json_object") == bool(self.source):
            what = "takes no source" if self.kind == "json_object" else "is empty"
            raise ForedraftError(f"the {self.kind} grammar {what}")

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str) -> "Grammar":
        """A JSON value under a schema; properties come in the schema's order. `{"x-guidance": {"whitespace_flexible":
        false}}` in it forbids white space, which small models are fond of. Keywords that llguidance does not enforce
        are refused."""
        return cls("json_schema", schema if isinstance(schema, str) else _written(schema))

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """A text that a regular expression matches as a whole (no look-around, no back-references)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Grammar":
        """One of these strings."""
        if isinstance(choices, str):
            raise ForedraftError("choice takes a list of strings, got one string")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def lark(cls, grammar: str) -> "Grammar":
        """A context-free grammar in llguidance's dialect of Lark; its start rule is `start`."""
        return cls("lark", grammar)


def _written(schema: Any) -> str:
    _check_schema(schema)
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ForedraftError(f"the schema is no JSON: {error}") from error


def _parsed(source: str, kind: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise ForedraftError(f"the {kind} grammar is nested more than {MAX_DEPTH} deep") from None
    except ValueError as error:
        raise ForedraftError(f"the source of a {kind} grammar must be JSON: {error}") from error


def _check_schema(schema: Any) -> None:
    """Level by level, so that neither depth nor an object that holds itself costs anything."""
    if not isinstance(schema, dict):
        raise ForedraftError(f"a JSON schema is an object, got {type(schema).__name__}")
    level: list[Any] = [schema]
    seen = 0
    for _ in range(MAX_DEPTH):
        below = [inner for value in level for inner in _inner(value)]
        seen += len(below)
        if seen > MAX_VALUES:
            raise ForedraftError(f"the schema holds more than {MAX_VALUES:,} values")
        level = [value for value in below if isinstance(value, (dict, list, tuple))]
        if not level:
            return
    raise ForedraftError(f"the schema is nested more than {MAX_DEPTH} deep")


def _inner(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) for one in choices):
        raise ForedraftError("choice takes a list of one string or more")
    if not all(choices):
        raise ForedraftError("choice holds an empty string; remove it")
    if len(choices) > MAX_CHOICES:
        raise ForedraftError(f"choice takes at most {MAX_CHOICES:,} strings, got {len(choices):,}")


@dataclass(frozen=True)
class Allowed:
    """What may follow one path."""

    mask: Tensor | None = None  # [V] bool; None = no path of this grammar leads here, or its end: everything
    is_finished: bool = False  # the grammar is satisfied and nothing can follow but an end id
    error: str | None = None  # nothing is allowed, for this reason


@dataclass
class Matcher:
    """Follows one text. It belongs to one request: not thread-safe.

    `after` may be asked in any order about paths below the same output; every answer is made once. Output only grows
    between calls, but for a restart from an earlier length.
    """

    start: Any  # LLMatcher before the first token; never moved
    vocab_size: int  # V of the logits
    num_known: int  # llguidance's id for the end, larger than those of the tokenizer
    eos_ids: frozenset[int] = frozenset()  # ids that end the text and are no part of it
    end_ids: frozenset[int] = frozenset()  # those and the request's own, which may be tokens of the grammar
    error: str | None = None  # the last one, whether or not the text went there
    num_masks: int = 0  # made so far

    def __post_init__(self) -> None:
        self._live: Any = None  # LLMatcher after `_done` tokens of the output and the path `_above`
        self._done = 0
        self._above: list[int] = []
        self._answers: dict[tuple[int, ...], Allowed] = {}  # by drafted path, below `_length` tokens of output
        self._length = -1
        ends = (self.eos_ids, self.end_ids)
        self._eos, self._ends = (
            torch.tensor(sorted(i for i in ids if i < self.vocab_size), dtype=torch.int64) for ids in ends
        )

    def after(self, output: Sequence[int], drafted: Sequence[int] = ()) -> Allowed:
        """What may follow the output and a drafted path below it."""
        if len(output) != self._length:
            self._answers.clear()
            self._length = len(output)
        path = tuple(drafted)
        found = self._answers.get(path)
        if found is None:
            found = self._answers[path] = self._answer(output, path)
        return found

    def restart(self) -> None:
        """Read the output anew at the next question: an answer was interrupted, and may have moved halfway."""
        self._live, self._length = None, -1

    def _answer(self, output: Sequence[int], path: Sequence[int]) -> Allowed:
        if self._live is None or len(output) < self._done:
            self._live, self._done, self._above = self.start.deep_copy(), 0, []
        if len(output) > self._done:
            if not self._move(output[self._done :]):
                return self._failed("the text has left its grammar")
            self._done, self._above = len(output), []
        if not self._move(path):
            return self._failed("") if self._live.is_error() else Allowed()
        bits = np.frombuffer(self._live.compute_bitmask(), np.uint8)
        if self._live.is_error():
            return self._failed("")
        self.num_masks += 1
        return self._allowed(torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool)))

    def _allowed(self, bits: Tensor) -> Allowed:
        """From what llguidance allows, [num_known + 1] or more: its own end is the last."""
        may_end = bool(bits[self.num_known])
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        size = min(self.vocab_size, self.num_known)
        mask[:size] = bits[:size]
        mask[self._eos] = False
        is_finished = may_end and not mask.any()
        if is_finished and not len(self._ends):
            return Allowed(is_finished=True)
        if may_end:
            mask[self._ends] = True
        if not mask.any():
            return self._failed("no token of the vocabulary goes on with the grammar")
        return Allowed(mask, is_finished)

    def _move(self, tokens: Sequence[int]) -> bool:
        """Stand after these tokens, instead of the path before. False where they cannot be followed."""
        same = 0
        for old, new in zip(self._above, tokens, strict=False):
            if old != new:
                break
            same += 1
        if same < len(self._above):
            self._live.rollback(len(self._above) - same)
            del self._above[same:]
        new_tokens = list(tokens[same:])
        if any(token in self.end_ids or token >= self.num_known for token in new_tokens):
            return False
        taken = self._live.try_consume_tokens(new_tokens) if new_tokens else 0
        self._above += new_tokens[:taken]
        return bool(taken == len(new_tokens))

    def _failed(self, why: str) -> Allowed:
        """llguidance never leaves an error: the next question starts over."""
        self.error = why or _first_line(self._live.get_error())
        self._live = None
        return Allowed(torch.zeros(self.vocab_size, dtype=torch.bool), error=self.error)


def _first_line(message: str) -> str:
    return message.strip().split("\n")[0] or "unknown error of llguidance"


class Grammars:
    """Grammars compiled for one tokenizer. Any thread may use it; what llguidance makes of the vocabulary is made once,
    when a grammar is first asked for.

    tokenizer: a transformers tokenizer, or None. vocab_size: V of the logits, which may be more or less than it has.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: tuple[Any, int] | None = None  # LLTokenizer, and how many ids have a text
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def matcher(self, grammar: Grammar, eos_ids: Collection[int], stop_ids: Collection[int] = ()) -> Matcher:
        """For one request, whose text `eos_ids` and `stop_ids` end. Raises ForedraftError for a grammar that cannot be
        compiled, a tokenizer that cannot be read, or where llguidance is not installed."""
        with self._lock:
            start = self._compiled.get(grammar)
            if start is None:
                start = self._compiled[grammar] = self._compile(grammar)
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            _, num_known = self._known()
            start = start.deep_copy()
        eos = frozenset(eos_ids)
        made = Matcher(start, self.vocab_size, num_known, eos, eos | frozenset(stop_ids))
        first = made.after(())
        if first.error is not None:
            raise ForedraftError(f"no text follows the {grammar.kind} grammar: {first.error}")
        return made

    def _compile(self, grammar: Grammar) -> Any:
        vocabulary, _ = self._known()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False)  # the whole state of the parser is no message
        try:
            made = LLMatcher(vocabulary, _source(grammar, LLMatcher), log_level=0, limits=limits)
        except ValueError as error:
            raise ForedraftError(f"the {grammar.kind} grammar cannot be used: {error}") from error
        if made.is_error():
            raise ForedraftError(f"the {grammar.kind} grammar cannot be used: {made.get_error().strip()[:1000]}")
        return made

    def _known(self) -> tuple[Any, int]:
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self.tokenizer)
        return self._vocabulary


def _source(grammar: Grammar, matcher: Any) -> str:
    """In llguidance's own form. Raises ValueError."""
    if grammar.kind == "regex":
        made = matcher.grammar_from_regex(grammar.source)
    elif grammar.kind == "choice":
        words = (json.dumps(one, ensure_ascii=False) for one in json.loads(grammar.source))
        made = matcher.grammar_from_lark("start: " + " | ".join(words))
    elif grammar.kind == "lark":
        made = matcher.grammar_from_lark(grammar.source)
    else:
        made = matcher.grammar_from_json_schema(grammar.source or '{"type": "object"}')
    return str(made)


def _vocabulary(tokenizer: Any) -> tuple[Any, int]:
    """llguidance's view of a tokenizer, with one token more for the end, and that token's id."""
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise ForedraftError(INSTALL) from error
    if tokenizer is None:
        raise ForedraftError("a grammar speaks of text, and this model has no tokenizer; give LLM(tokenizer=...)")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ForedraftError(f"grammars need a fast tokenizer (tokenizer.json); {type(tokenizer).__name__} is none")
    copy = type(backend).from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    copy.add_special_tokens([END])
    end = copy.token_to_id(END)
    if end <= max(backend.get_vocab(with_added_tokens=True).values(), default=-1):
        raise ForedraftError("the tokenizer's ids have gaps, which grammars cannot be compiled for")
    return LLTokenizer(copy.to_str(), eos_token=end), end
