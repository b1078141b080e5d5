"""Structured output: texts that follow a JSON schema, a regular expression, a list of choices or a Lark grammar.

A `Grammar` says what is wanted, `Grammars` compiles it for one vocabulary (with llguidance), and a `Matcher` follows
one text and says, after any drafted path, which tokens may come next.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foredraft.errors import ForedraftError, how_to_install
from foredraft.grammar_checks import (
    check_choices,
    check_repeats,
    check_schema,
    check_schema_counts,
    check_size,
    parsed,
)

KINDS = ("json_object", "json_schema", "regex", "choice", "lark")
WHITESPACE: dict[str, dict[str, Any]] = {  # llguidance's words for each; a schema's own "x-guidance" goes before them
    "bounded": {"whitespace_pattern": r" |\n {0,32}|\n\t{0,8}"},  # at every place once
    "compact": {"whitespace_flexible": False},
    "flexible": {},
}
KEPT = 32  # compiled grammars of one model
MAX_KEPT = 1 << 19  # bytes of their sources: one compiled takes up to some 250 times as many
# Of one text. llguidance's defaults let (a{1000}){1000} take 1.5 s and 180 MiB before it fails, and one text 500 MiB of
# states. With these a mask that is given up takes 0.2 s at most, and schemas of 2,000 properties, of 1,000 patterns
# and of 500 alternatives need no more.
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 1 << 16,  # of 1 to 2 kB: as many as a counted string has characters
}
META = frozenset(r"\.+*?()|[]{}^$#&-~/")  # what the regex crate takes for more than itself
PAST_LIMITS = "the text has grown past the limits of llguidance's parser"  # every token of it was allowed
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
    whitespace: str = "bounded"  # of the JSON kinds

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ForedraftError(f"unknown kind of grammar {self.kind!r}; use one of {', '.join(KINDS)}")
        if not isinstance(self.source, str):
            raise ForedraftError(f"the source of a {self.kind} grammar is a string, got {type(self.source).__name__}")
        if self.whitespace not in WHITESPACE:
            raise ForedraftError(f"unknown whitespace {self.whitespace!r}; use one of {', '.join(WHITESPACE)}")
        check_size(self.source, self.kind)
        if self.kind == "json_schema":
            schema = parsed(self.source, self.kind)
            check_schema(schema)
            check_schema_counts(schema)
        elif self.kind == "choice":
            check_choices(parsed(self.source, self.kind))
        elif (self.kind == "json_object") == bool(self.source):
            what = "takes no source" if self.kind == "json_object" else "is empty"
            raise ForedraftError(f"the {self.kind} grammar {what}")
        elif self.source:
            check_repeats(self.source, self.kind)

    @classmethod
    def json_object(cls, whitespace: str = "bounded") -> "Grammar":
        """Any JSON object. whitespace: see `json_schema`."""
        return cls("json_object", whitespace=whitespace)

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str, whitespace: str = "bounded") -> "Grammar":
        """A JSON value under a schema; properties come in the schema's order. Keywords that llguidance does not enforce
        are refused.

        whitespace: what may stand between the parts of the value. "bounded": one space, or a new line with up to 32
        spaces or 8 tabs, as JSON is usually written; small models that may write blanks for ever do so. "compact":
        nothing. "flexible": any. `"x-guidance": {"whitespace_flexible": ..., "whitespace_pattern": ...}` in the schema
        goes before it. Strings, numbers and arrays are as long as the schema lets them be: give `maxLength`,
        `maximum` and `maxItems`, or max_tokens may cut the text in the middle.
        Raises ForedraftError for a schema that is malformed or too large.
        """
        return cls("json_schema", schema if isinstance(schema, str) else _written(schema), whitespace)

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
    check_schema(schema)
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ForedraftError(f"the schema is no JSON: {error}") from error


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
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._live: Any = None  # LLMatcher after `_done` tokens of the output and the path `_above`
        self._done = 0
        self._above: list[int] = []
        self._answers: dict[tuple[int, ...], Allowed] = {}  # by drafted path, below `_length` tokens of output
        self._length = -1
        self._seconds = 0.0
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
            began = self.clock()
            is_new = self._live is None or len(output) < self._done
            found = self._answer(output, path)
            if found.error is not None and not is_new:  # the limits count what was asked before: let the text decide
                again = self._answer(output, path)
                found = found if again.error is not None else again
            self.error = found.error or self.error
            self._answers[path] = found
            self._seconds += self.clock() - began
        return found

    def restart(self) -> None:
        """Read the output anew at the next question: an answer was interrupted, and may have moved halfway."""
        self._live, self._length = None, -1

    def take_seconds(self) -> float:
        """Seconds that its answers took since this was last asked."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def check_first(self) -> str | None:
        """Why no text can begin, or cannot go on after the first token that is allowed; None = it can."""
        first = self.after(())
        if first.error is not None or first.mask is None or first.is_finished:
            return first.error
        tokens = first.mask.nonzero().flatten().tolist()
        inside = [token for token in tokens if token not in self.end_ids]
        return self.after((), inside[-1:]).error if inside else None  # the last: of the longest, in most vocabularies

    def _answer(self, output: Sequence[int], path: Sequence[int]) -> Allowed:
        if self._live is None or len(output) < self._done:
            self._live, self._done, self._above = self.start.deep_copy(), 0, []
        if len(output) > self._done:
            if not self._move(output[self._done :]):
                return self._failed("" if self._live.is_error() else PAST_LIMITS)
            self._done, self._above = len(output), []
        if not self._move(path):
            if self._live.is_error() or self._is_allowed(path, len(self._above)):
                return self._failed("" if self._live.is_error() else PAST_LIMITS)
            return Allowed()
        bits = np.frombuffer(self._live.compute_bitmask(), np.uint8)
        if self._live.is_error():
            return self._failed("")
        self.num_masks += 1
        return self._allowed(torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool)))

    def _is_allowed(self, path: Sequence[int], place: int) -> bool:
        """Whether the token of a path at this place was allowed, so that it must be possible to follow it."""
        if any(token in self.end_ids or token >= self.num_known for token in path[place:]):  # not even tried
            return False
        above = self._answers.get(tuple(path[:place]))
        return above is not None and above.mask is not None and bool(above.mask[path[place]])

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
    """What llguidance says, with the number of a limit that it leaves out."""
    line = message.strip().split("\n")[0] or "unknown error of llguidance"
    is_bare = line.endswith("too many expressions constructed")
    return f"{line} (limit {LIMITS['initial_lexer_fuel']:,})" if is_bare else line


class Grammars:
    """Grammars compiled for one tokenizer. Any thread may use it; what llguidance makes of the vocabulary is made once,
    when a grammar is first asked for.

    tokenizer: a transformers tokenizer, or None. vocab_size: V of the logits, which may be more or less than it has.
    limits: of llguidance's parser, by its names; None = `LIMITS`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, limits: Mapping[str, int] | None = None) -> None:
        self.tokenizer = tokenizer
        self.limits = LIMITS if limits is None else limits
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
                self._drop()
            self._compiled.move_to_end(grammar)
            _, num_known = self._known()
            start = start.deep_copy()
        eos = frozenset(eos_ids)
        made = Matcher(start, self.vocab_size, num_known, eos, eos | frozenset(stop_ids))
        why = made.check_first()
        if why is not None:
            raise ForedraftError(f"no text follows the {grammar.kind} grammar: {why}")
        return made

    def _drop(self) -> None:
        """Those not asked for the longest, but for the newest."""
        sizes = [len(grammar.source) for grammar in self._compiled]
        while len(sizes) > 1 and (len(sizes) > KEPT or sum(sizes) > MAX_KEPT):
            self._compiled.popitem(last=False)
            del sizes[0]

    def _compile(self, grammar: Grammar) -> Any:
        vocabulary, _ = self._known()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **self.limits)  # the whole state of the parser is no message
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
    elif grammar.kind == "choice":  # not a rule of alternatives: a rule may have 2,000 at most
        made = matcher.grammar_from_regex("|".join(map(_escaped, json.loads(grammar.source))))
    elif grammar.kind == "lark":
        made = matcher.grammar_from_lark(grammar.source)
    else:
        schema = grammar.source or '{"type": "object"}'
        made = matcher.grammar_from_json_schema(schema, defaults=WHITESPACE[grammar.whitespace])
    return str(made)


def _escaped(text: str) -> str:
    """As a regular expression that matches this text alone."""
    return "".join("\\" + letter if letter in META else letter for letter in text)


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
