"""Structured output: outputs that follow a JSON schema, a regular expression, a list of choices or a Lark grammar.

`Grammar` is the source, and `GrammarCompiler` compiles it for one vocabulary with llguidance. Every request has a
`GrammarMatcher` (`grammar_matcher.py`).
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.errors import ForedraftError, format_install_command
from foredraft.sampling.grammar_checks import (
    check_choices,
    check_repeats,
    check_schema,
    check_schema_counts,
    check_size,
    parse_json,
)
from foredraft.sampling.grammar_cursor import PARSER_LIMITS, GrammarCursor
from foredraft.sampling.grammar_matcher import GrammarMatcher
from foredraft.sampling.grammar_tokens import GrammarTokens

KINDS = ("json_object", "json_schema", "regex", "choice", "lark")
WHITESPACE: dict[str, dict[str, Any]] = {  # options of llguidance; "x-guidance" in a schema goes before them
    "bounded": {"whitespace_pattern": r" |\n {0,32}|\n\t{0,8}"},  # at most once between two parts
    "compact": {"whitespace_flexible": False},
    "flexible": {},
}
MAX_COMPILED = 32  # compiled grammars of one model
MAX_COMPILED_BYTES = 1 << 19  # bytes of their sources; a compiled grammar takes up to 250 times as much memory
REGEX_META = frozenset(r"\.+*?()|[]{}^$#&-~/")  # characters with a special meaning for the regex crate
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
        tokens = GrammarTokens(self.vocab_size, parser_end_id, eos, eos | frozenset(stop_ids))
        matcher = GrammarMatcher(GrammarCursor(start, tokens))
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
    try:
        return LLTokenizer(copy.to_str(), eos_token=end), end
    except ValueError as error:
        raise ForedraftError(
            f"llguidance does not read this tokenizer, so grammars are not supported: {error}"
        ) from error
