"""Structured output: outputs that follow a JSON schema, a regular expression, a list of choices or a Lark grammar.

`Grammar` is the source, `GrammarCompiler` compiles it for one vocabulary with llguidance, and `GrammarMatcher` follows
one sequence and returns the tokens that are allowed after any path of draft tokens.
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

from foredraft.errors import ForedraftError, format_install_command
from foredraft.sampling.grammar_checks import (
    check_choices,
    check_repeats,
    check_schema,
    check_schema_counts,
    check_size,
    parse_json,
)

KINDS = ("json_object", "json_schema", "regex", "choice", "lark")
WHITESPACE: dict[str, dict[str, Any]] = {  # options of llguidance; "x-guidance" in a schema goes before them
    "bounded": {"whitespace_pattern": r" |\n {0,32}|\n\t{0,8}"},  # at most once between two parts
    "compact": {"whitespace_flexible": False},
    "flexible": {},
}
MAX_COMPILED = 32  # compiled grammars of one model
MAX_COMPILED_BYTES = 1 << 19  # bytes of their sources; a compiled grammar takes up to 250 times as much memory
# Limits for one sequence. With llguidance's defaults (a{1000}){1000} takes 1.5 s and 180 MiB before it fails, and one
# sequence up to 500 MiB of states. With these a mask that fails takes at most 0.2 s. Schemas with 2,000 properties,
# 1,000 patterns or 500 alternatives stay within them.
PARSER_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 1 << 16,  # 1 to 2 kB each; a counted string needs one per character
}
REGEX_META = frozenset(r"\.+*?()|[]{}^$#&-~/")  # characters with a special meaning for the regex crate
# Error for a sequence of allowed tokens that llguidance cannot follow.
LIMITS_EXCEEDED = "the text has grown past the limits of llguidance's parser"
INSTALL_HINT = f"structured output needs llguidance: {format_install_command('grammar')}"
END_TOKEN = "<|end of grammar|>"  # extra token for the end of a grammar, mapped to the end ids of a request


@dataclass(frozen=True)
class Grammar:
    """Grammar that an output must follow from its first token to its end.

    End ids (EOS and stop_token_ids) are allowed only if the grammar is satisfied. If nothing else can follow, only end
    ids are allowed, regardless of min_tokens and bad_words. A request without end ids (ignore_eos, or a model that has
    none) then ends with finish_reason "stop". max_tokens and stop strings can still end an output early, and token ids
    in stop_token_ids may be tokens of the grammar.

    Raises:
        ValueError: for a source that is too large, too deeply nested or malformed. Errors that only the compiler can
            detect are raised by LLM.
    """

    kind: str
    source: str = ""  # JSON (json_schema, choice), syntax of Rust's regex crate (regex) or of llguidance (lark)
    whitespace: str = "bounded"  # for the JSON kinds; see `json_schema`

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ForedraftError(f"unknown kind of grammar {self.kind!r}; use one of {', '.join(KINDS)}")
        if not isinstance(self.source, str):
            raise ForedraftError(f"the source of a {self.kind} grammar is a string, got {type(self.source).__name__}")
        if self.whitespace not in WHITESPACE:
            raise ForedraftError(f"unknown whitespace {self.whitespace!r}; use one of {', '.join(WHITESPACE)}")
        check_size(self.source, self.kind)
        if self.kind == "json_schema":
            schema = parse_json(self.source, self.kind)
            check_schema(schema)
            check_schema_counts(schema)
        elif self.kind == "choice":
            check_choices(parse_json(self.source, self.kind))
        elif (self.kind == "json_object") == bool(self.source):
            problem = "takes no source" if self.kind == "json_object" else "is empty"
            raise ForedraftError(f"the {self.kind} grammar {problem}")
        elif self.source:
            check_repeats(self.source, self.kind)

    @classmethod
    def json_object(cls, whitespace: str = "bounded") -> "Grammar":
        """Allow any JSON object. whitespace: see `json_schema`."""
        return cls("json_object", whitespace=whitespace)

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str, whitespace: str = "bounded") -> "Grammar":
        """Allow a JSON value that satisfies a schema. Properties come in the order of the schema.

        Give `maxLength`, `maximum` and `maxItems`, or max_tokens may end the output in the middle of a value.

        Args:
            schema: as a dict or as JSON. Keywords that llguidance does not enforce are refused.
            whitespace: between the parts of the value. "bounded" (default) = one space, or a new line with up to 32
                spaces or 8 tabs. "compact" = none. "flexible" = any; small models may then write blanks without end.
                `"x-guidance": {"whitespace_flexible": ..., "whitespace_pattern": ...}` in the schema goes before it.

        Raises:
            ForedraftError: for a schema that is malformed or too large.
        """
        return cls("json_schema", schema if isinstance(schema, str) else _dump_schema(schema), whitespace)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Allow outputs that a regular expression matches as a whole; no look-around, no back-references."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> "Grammar":
        """Allow one of these strings."""
        if isinstance(choices, str):
            raise ForedraftError("choice takes a list of strings, got one string")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def lark(cls, grammar: str) -> "Grammar":
        """Allow the language of a context-free grammar in llguidance's dialect of Lark, with the start rule `start`."""
        return cls("lark", grammar)


def _dump_schema(schema: Any) -> str:
    check_schema(schema)
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ForedraftError(f"the schema is no JSON: {error}") from error


@dataclass(frozen=True)
class AllowedTokens:
    """Tokens that may follow one path."""

    mask: Tensor | None = None  # [V] bool; None = all, because the path violates the grammar or there are no end ids
    is_finished: bool = False  # the grammar is satisfied, and only end ids can follow
    error: str | None = None  # reason why no token is allowed


@dataclass
class GrammarMatcher:
    """Follows the sequence of one request. Not thread-safe.

    `find_allowed` may be called in any order for draft paths after the same output; results are cached. Between calls
    the output grows, or restarts from an earlier length.
    """

    initial_matcher: Any  # LLMatcher before the first token; never moved
    vocab_size: int  # V of the logits
    parser_end_id: int  # llguidance's id for the end, larger than those of the tokenizer
    eos_ids: frozenset[int] = frozenset()  # ids that end the text and are no part of it
    end_ids: frozenset[int] = frozenset()  # those and stop_token_ids, which may be tokens of the grammar
    error: str | None = None  # last error, also of a path that was rejected
    num_masks: int = 0  # masks computed so far
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._matcher: Any = None  # LLMatcher after `_num_consumed` output tokens and then `_consumed_path`
        self._num_consumed = 0
        self._consumed_path: list[int] = []
        # Results by draft path after `_output_length` output tokens.
        self._allowed_by_path: dict[tuple[int, ...], AllowedTokens] = {}
        self._output_length = -1
        self._mask_seconds = 0.0
        ends = (self.eos_ids, self.end_ids)
        self._eos_tensor, self._end_tensor = (
            torch.tensor(sorted(i for i in ids if i < self.vocab_size), dtype=torch.int64) for ids in ends
        )

    def find_allowed(self, output: Sequence[int], draft_path: Sequence[int] = ()) -> AllowedTokens:
        """Return the tokens that may follow the output and a path of draft tokens after it."""
        if len(output) != self._output_length:
            self._allowed_by_path.clear()
            self._output_length = len(output)
        path = tuple(draft_path)
        found = self._allowed_by_path.get(path)
        if found is None:
            began = self.clock()
            is_new = self._matcher is None or len(output) < self._num_consumed
            found = self._compute_allowed(output, path)
            # llguidance's limits also count earlier paths, so an error is only reported if a new matcher repeats it.
            if found.error is not None and not is_new:
                retried = self._compute_allowed(output, path)
                found = found if retried.error is not None else retried
            self.error = found.error or self.error
            self._allowed_by_path[path] = found
            self._mask_seconds += self.clock() - began
        return found

    def restart(self) -> None:
        """Discard the matcher after an interrupted call; the next call reads the output from the start."""
        self._matcher, self._output_length = None, -1

    def take_seconds(self) -> float:
        """Return the seconds spent on masks since the last call, and reset the counter."""
        seconds, self._mask_seconds = self._mask_seconds, 0.0
        return seconds

    def check_first(self) -> str | None:
        """Return why no first or second token is allowed; None if the grammar can start."""
        first = self.find_allowed(())
        if first.error is not None or first.mask is None or first.is_finished:
            return first.error
        tokens = first.mask.nonzero().flatten().tolist()
        inside = [token for token in tokens if token not in self.end_ids]
        # The last id is among the longest tokens of most vocabularies.
        return self.find_allowed((), inside[-1:]).error if inside else None

    def _compute_allowed(self, output: Sequence[int], path: Sequence[int]) -> AllowedTokens:
        if self._matcher is None or len(output) < self._num_consumed:
            self._matcher, self._num_consumed, self._consumed_path = self.initial_matcher.deep_copy(), 0, []
        if len(output) > self._num_consumed:
            if not self._advance_to(output[self._num_consumed :]):
                return self._fail("" if self._matcher.is_error() else LIMITS_EXCEEDED)
            self._num_consumed, self._consumed_path = len(output), []
        if not self._advance_to(path):
            if self._matcher.is_error() or self._is_allowed(path, len(self._consumed_path)):
                return self._fail("" if self._matcher.is_error() else LIMITS_EXCEEDED)
            return AllowedTokens()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return self._fail("")
        self.num_masks += 1
        return self._build_allowed(torch.from_numpy(np.unpackbits(bits, bitorder="little").astype(bool)))

    def _is_allowed(self, path: Sequence[int], depth: int) -> bool:
        """Whether the mask allowed the token of a path at this depth, so that a failure to follow it is an error."""
        if any(token in self.end_ids or token >= self.parser_end_id for token in path[depth:]):  # llguidance not called
            return False
        before = self._allowed_by_path.get(tuple(path[:depth]))
        return before is not None and before.mask is not None and bool(before.mask[path[depth]])

    def _build_allowed(self, bits: Tensor) -> AllowedTokens:
        """Convert llguidance's mask, indexed by token id up to at least `parser_end_id`."""
        may_end = bool(bits[self.parser_end_id])
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        size = min(self.vocab_size, self.parser_end_id)
        mask[:size] = bits[:size]
        mask[self._eos_tensor] = False
        is_finished = may_end and not mask.any()
        if is_finished and not len(self._end_tensor):
            return AllowedTokens(is_finished=True)
        if may_end:
            mask[self._end_tensor] = True
        if not mask.any():
            return self._fail("no token of the vocabulary goes on with the grammar")
        return AllowedTokens(mask, is_finished)

    def _advance_to(self, tokens: Sequence[int]) -> bool:
        """Move the matcher from the consumed path to this one; return false if the grammar does not allow it."""
        same = 0
        for old, new in zip(self._consumed_path, tokens, strict=False):
            if old != new:
                break
            same += 1
        if same < len(self._consumed_path):
            self._matcher.rollback(len(self._consumed_path) - same)
            del self._consumed_path[same:]
        new_tokens = list(tokens[same:])
        if any(token in self.end_ids or token >= self.parser_end_id for token in new_tokens):
            return False
        num_consumed = self._matcher.try_consume_tokens(new_tokens) if new_tokens else 0
        self._consumed_path += new_tokens[:num_consumed]
        return bool(num_consumed == len(new_tokens))

    def _fail(self, reason: str) -> AllowedTokens:
        """Record an error and discard the matcher, because an llguidance matcher cannot leave an error state."""
        self.error = reason or _format_error(self._matcher.get_error())
        self._matcher = None
        return AllowedTokens(torch.zeros(self.vocab_size, dtype=torch.bool), error=self.error)


def _format_error(message: str) -> str:
    """Return the first line of llguidance's message, with the limit if the message leaves it out."""
    line = message.strip().split("\n")[0] or "unknown error of llguidance"
    lacks_limit = line.endswith("too many expressions constructed")
    return f"{line} (limit {PARSER_LIMITS['initial_lexer_fuel']:,})" if lacks_limit else line


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and caches them. Any thread may use it.

    llguidance's view of the vocabulary is built with the first grammar.

    Args:
        tokenizer: a transformers tokenizer, or None.
        vocab_size: V of the logits; it may differ from the size of the tokenizer.
        limits: limits of llguidance's parser by name. Default None = `PARSER_LIMITS`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, limits: Mapping[str, int] | None = None) -> None:
        self.tokenizer = tokenizer
        self.limits = PARSER_LIMITS if limits is None else limits
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: tuple[Any, int] | None = None  # LLTokenizer and its id for the end of a grammar
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def create_matcher(
        self, grammar: Grammar, eos_ids: Collection[int], stop_ids: Collection[int] = ()
    ) -> GrammarMatcher:
        """Return a matcher for one request, with the end ids of the model and the stop ids of the request.

        Raises:
            ForedraftError: if the grammar cannot be compiled, the tokenizer is not supported, or llguidance is missing.
        """
        with self._lock:
            start = self._compiled.get(grammar)
            if start is None:
                start = self._compiled[grammar] = self._compile(grammar)
                self._evict()
            self._compiled.move_to_end(grammar)
            _, parser_end_id = self._get_vocabulary()
            start = start.deep_copy()
        eos = frozenset(eos_ids)
        matcher = GrammarMatcher(start, self.vocab_size, parser_end_id, eos, eos | frozenset(stop_ids))
        reason = matcher.check_first()
        if reason is not None:
            raise ForedraftError(f"no text follows the {grammar.kind} grammar: {reason}")
        return matcher

    def _evict(self) -> None:
        """Drop the least recently used grammars above the limits, but never the newest one."""
        sizes = [len(grammar.source) for grammar in self._compiled]
        while len(sizes) > 1 and (len(sizes) > MAX_COMPILED or sum(sizes) > MAX_COMPILED_BYTES):
            self._compiled.popitem(last=False)
            del sizes[0]

    def _compile(self, grammar: Grammar) -> Any:
        vocabulary, _ = self._get_vocabulary()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **self.limits)  # verbose errors contain the whole parser state
        try:
            matcher = LLMatcher(vocabulary, _convert_source(grammar, LLMatcher), log_level=0, limits=limits)
        except ValueError as error:
            raise ForedraftError(f"the {grammar.kind} grammar cannot be used: {error}") from error
        if matcher.is_error():
            raise ForedraftError(f"the {grammar.kind} grammar cannot be used: {matcher.get_error().strip()[:1000]}")
        return matcher

    def _get_vocabulary(self) -> tuple[Any, int]:
        if self._vocabulary is None:
            self._vocabulary = _build_vocabulary(self.tokenizer)
        return self._vocabulary


def _convert_source(grammar: Grammar, matcher: Any) -> str:
    """Return the grammar in llguidance's own form. Raises ValueError."""
    if grammar.kind == "regex":
        converted = matcher.grammar_from_regex(grammar.source)
    elif grammar.kind == "choice":  # a regex, because a rule may have at most 2,000 alternatives
        converted = matcher.grammar_from_regex("|".join(map(_escape_regex, json.loads(grammar.source))))
    elif grammar.kind == "lark":
        converted = matcher.grammar_from_lark(grammar.source)
    else:
        schema = grammar.source or '{"type": "object"}'
        converted = matcher.grammar_from_json_schema(schema, defaults=WHITESPACE[grammar.whitespace])
    return str(converted)


def _escape_regex(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return "".join("\\" + letter if letter in REGEX_META else letter for letter in text)


def _build_vocabulary(tokenizer: Any) -> tuple[Any, int]:
    """Return an LLTokenizer with one extra token for the end of a grammar, and the id of that token."""
    try:
        from llguidance import LLTokenizer
    except ImportError as error:
        raise ForedraftError(INSTALL_HINT) from error
    if tokenizer is None:
        raise ForedraftError("a grammar needs a tokenizer, and this model has none; give LLM(tokenizer=...)")
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ForedraftError(f"grammars need a fast tokenizer (tokenizer.json); {type(tokenizer).__name__} is none")
    copy = type(backend).from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    copy.add_special_tokens([END_TOKEN])
    end = copy.token_to_id(END_TOKEN)
    if end <= max(backend.get_vocab(with_added_tokens=True).values(), default=-1):
        raise ForedraftError("the tokenizer's ids have gaps, which grammars cannot be compiled for")
    return LLTokenizer(copy.to_str(), eos_token=end), end
